"""Adapters for models that do not use transformers' AttentionInterface.

An adapter replaces one method of the model's attention modules while the model is attached. It passes q, k and v, as
cached, to `interface`, a function of AttentionInterface, and handles its output as the replaced method does.
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
    """Replacement of one method of a model's attention.

    Attributes:
        modules: Class name of the attention modules.
        method: Name of the replaced method.
        attend: Replacement; called with the interface, then with the arguments of the method.
        kv_heads: Returns the number of KV heads, if the config does not have num_key_value_heads.
        reason: Why a config is not supported; empty if it is.
        whole_mask: Whether the model needs a mask even if it hides nothing.
        by_distance: Whether the model uses positions only as distances between tokens.
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
    """Route a model's attention through an interface of this name until the block ends."""
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
