"""Models whose attention does not ask transformers' AttentionInterface, each led through it by a few lines.

An adapter takes the place of one method of the model's attention modules while the model is attached. It hands q, k and
v as they are cached to `interface`, a function of AttentionInterface, and does with its output what the method does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from host_driver.hf.adapters.bloom import bloom_forward
from host_driver.hf.adapters.falcon import falcon_forward, falcon_kv_heads, falcon_reason
from host_driver.hf.adapters.gptj import inner_attention
from host_driver.hf.adapters.mpt import mpt_forward


@dataclass(frozen=True, slots=True)
class Adapter:
    """modules: the class name of a model's attention. method: of them, what `attend` takes the place of; it is called
    with the interface first, then as the method is.

    kv_heads: from a config that does not call them num_key_value_heads. reason: why a config cannot be served, empty
    where it can. whole_mask: whether the model needs a mask also where none hides anything. by_distance: whether all
    that it knows of positions is how far apart tokens are.
    """

    modules: str
    method: str
    attend: Callable[..., Any]
    kv_heads: Callable[[PreTrainedConfig], int] | None = None
    reason: Callable[[PreTrainedConfig], str] = lambda config: ""
    whole_mask: bool = False
    by_distance: bool = False


ADAPTERS: Mapping[str, Adapter] = {  # by model type
    "bloom": Adapter("BloomAttention", "forward", bloom_forward, by_distance=True),
    "codegen": Adapter("CodeGenAttention", "_attn", inner_attention),
    "falcon": Adapter("FalconAttention", "forward", falcon_forward, falcon_kv_heads, falcon_reason),
    "gptj": Adapter("GPTJAttention", "_attn", inner_attention),
    "mpt": Adapter("MptAttention", "forward", mpt_forward, whole_mask=True, by_distance=True),
}


@contextmanager
def adapted(model: PreTrainedModel, implementation: str, interface: Callable[..., Any]) -> Iterator[None]:
    """Lead a model's attention through an interface of this name until the block ends."""
    config = model.config.get_text_config(decoder=True)
    adapter = ADAPTERS[config.model_type]
    before = config._attn_implementation
    modules = [module for module in model.modules() if type(module).__name__ == adapter.modules]
    config._attn_implementation_internal = implementation
    try:
        for module in modules:
            setattr(module, adapter.method, MethodType(partial(_first, adapter.attend, interface), module))
        yield
    finally:
        for module in modules:
            module.__dict__.pop(adapter.method, None)
        config._attn_implementation_internal = before


def _first(attend: Callable[..., Any], interface: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return attend(interface, *args, **kwargs)
