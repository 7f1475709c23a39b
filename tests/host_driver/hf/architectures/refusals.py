"""Confirms the reason of a refusal in the model, by a method independent of the one that refused.

The model runs again by itself, with transformers' default cache, and with an attention function that records its
arguments.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from host_driver.hf.cache_argument import CACHE_ARGUMENTS

NOTING = "noting"
PARTS = (  # of kinds of layers; what classes of their caches, or of their modules, are called
    ("sliding chunked", "Sliding"),
    ("linear conv hybrid", "LinearAttention Lightning Recurrent"),
    ("indexed", "Indexer"),
    ("compressed", "Compressor"),
)


def confirmed(reason: str, model: PreTrainedModel, ids: torch.Tensor) -> bool:
    """Whether a model has the property that a refusal states; ids (B, tokens) are a prompt for it.

    False for an unknown reason.
    """
    for pattern, check in CHECKS:
        if result := re.search(pattern, reason):
            return check(model, ids, *result.groups())
    return False


def _own_cache(model: PreTrainedModel, ids: torch.Tensor) -> Any:
    out = model(input_ids=ids, use_cache=True)
    return next((out[name] for name in (*CACHE_ARGUMENTS, "cache_params") if name in out), None)


def _noted(model: PreTrainedModel, ids: torch.Tensor) -> list[dict[str, Any]]:
    """Arguments of each attention call of the model's layers, recorded by a replacement function."""
    calls: list[dict[str, Any]] = []

    def note(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        calls.append(kwargs | {"module": module, "key": key, "value": value, "mask": attention_mask})
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=kwargs.get("scaling"))

    AttentionInterface.register(NOTING, note)
    AttentionMaskInterface.register(NOTING, sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(NOTING)
    try:
        model(input_ids=ids)
    finally:
        model.set_attn_implementation(before)
    return calls


def _kinds(model: PreTrainedModel, ids: torch.Tensor, kinds: str) -> bool:
    """Whether each kind of layer is found in the model, in its own cache, or as a window in its config."""
    layers = getattr(_own_cache(model, ids), "layers", [])
    names = {type(part).__name__ for part in (*model.modules(), *layers)}
    config = model.config.get_text_config(decoder=True).to_dict()
    windows = [name for name, value in config.items() if "window" in name and value]
    for kind in kinds.split(", "):
        parts = [part for words, some in PARTS if any(word in kind for word in words.split()) for part in some.split()]
        seen = any(part in name for name in names for part in parts)
        named = any(kind in name.lower() for name in names)
        if not (seen or named or ("sliding" in kind and windows)):
            return False
    return True


def _fixed(model: PreTrainedModel, ids: torch.Tensor) -> bool:
    """A replacement attention is not called, or a part of the model does not look it up."""
    attentions = {type(part) for part in model.modules() if type(part).__name__.endswith("Attention")}
    return not _noted(model, ids) or any("get_interface(" not in inspect.getsource(each) for each in attentions)


def _generates_all_again(model: PreTrainedModel, ids: torch.Tensor) -> bool:
    """The second step of a generation is given the prompt once more."""
    given: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: given.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    model.generate(ids, max_new_tokens=2, do_sample=False)
    hook.remove()
    return given[1] > 1


def _keeps(model: PreTrainedModel, ids: torch.Tensor, name: str) -> bool:
    """Whether the model returns its state under this name, and no cache of keys and values."""
    out = model(input_ids=ids, use_cache=True)
    return out.get(name) is not None and not any(other in out for other in CACHE_ARGUMENTS if other != name)


def _looks_ahead(model: PreTrainedModel, ids: torch.Tensor) -> bool:
    """Another last token changes the logits of the first."""
    other = ids.clone()
    other[:, -1] += 1
    first, second = (model(input_ids=each).logits[:, 0] for each in (ids, other))
    return bool((first - second).abs().max() > 0)


def _cached_otherwise(model: PreTrainedModel, ids: torch.Tensor, layer: str, heads: str, channels: str) -> bool:
    """The model's own cache has these keys, and they, or its values, are not of the config's heads."""
    own = _own_cache(model, ids).layers[int(layer)]
    config = model.config.get_text_config(decoder=True)
    said = (int(heads), int(channels))
    result = {(each.shape[1], each.shape[3]) for each in (own.keys, own.values)}
    whole = (config.num_key_value_heads, getattr(config, "head_dim", None) or config.hidden_size)
    return said in result and (len(result) > 1 or said != whole)


def _twice(model: PreTrainedModel, ids: torch.Tensor) -> bool:
    return max(Counter(call["module"] for call in _noted(model, ids)).values()) > 1


def _biased(model: PreTrainedModel, ids: torch.Tensor) -> bool:
    """The mask has values other than 0 and the lowest number of its type."""
    masks = [call["mask"] for call in _noted(model, ids) if call["mask"] is not None]
    return any(mask.is_floating_point() and ((mask != 0) & (mask > -1e4)).any() for mask in masks)


def _changed_keys(model: PreTrainedModel, ids: torch.Tensor) -> bool:
    """Attended keys have a different shape from cached ones."""
    cached = _own_cache(model, ids).layers[0].keys.shape
    return any(call["key"].shape != cached for call in _noted(model, ids))


def _other_shapes(model: PreTrainedModel, ids: torch.Tensor) -> bool:
    layers = [layer for layer in _own_cache(model, ids).layers if layer.is_initialized]
    return len({(layer.keys.shape[1], layer.keys.shape[3]) for layer in layers}) > 1


def _crosses(model: PreTrainedModel, ids: torch.Tensor) -> bool:
    return any("cross" in f"{name} {type(part).__name__}".lower() for name, part in model.named_modules())


def _unnamed(model: PreTrainedModel, ids: torch.Tensor, name: str) -> bool:
    """Neither the config of the decoder nor what its names are mapped to has this."""
    config = model.config.get_text_config(decoder=True)
    return config.attribute_map.get(name, name) not in config.to_dict()


CHECKS: tuple[tuple[str, Callable[..., bool]], ...] = (
    (r"layers of kind ([\w, ]+):", _kinds),
    (r"layer (\d+) caches \w+s of (\d+) heads x (\d+) channels", _cached_otherwise),
    (r"has no (\w+)[\w ]* in its config", _unnamed),
    (r"keeps (\w+) instead of keys and values", _keeps),
    (r"encoder-decoder", lambda model, ids: "decoder_input_ids" in inspect.signature(model.forward).parameters),
    (r"does not let its attention be replaced", _fixed),
    (r"cannot attend by sdpa", lambda model, ids: model.config._attn_implementation != "sdpa"),
    (r"attends to later tokens", _looks_ahead),
    (r"attends twice", _twice),
    (r"cache of its own kind", lambda model, ids: type(_own_cache(model, ids)) is not DynamicCache),
    (r"cross-attention", _crosses),
    (r"several shapes", _other_shapes),
    (r"generates without a cache", _generates_all_again),
    (r"attention mask of torch\.float", _biased),
    (r"did not pass the cached keys", _changed_keys),
)
