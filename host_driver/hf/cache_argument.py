"""The cache argument of a model's forward, which transformers 5.24 renamed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

OLD_NAME = "past_key_values"  # before transformers 5.24, which still takes it
CACHE_ARGUMENTS = "cache", OLD_NAME  # of a model's forward


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """Name of the cache among the arguments of a model's forward; None if it takes none."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), None)


def forward_on(model: PreTrainedModel, cache: Any, **inputs: Any) -> tuple[Any, Any]:
    """Run a forward of a model on a cache (None: a new one); returns the model's output and the filled cache."""
    name = cache_argument(model.forward)
    assert name is not None, f"{type(model).__name__} takes no cache"
    out = model(**inputs, **{name: cache}, use_cache=True)
    return out, out[name]
