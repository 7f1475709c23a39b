"""Supported models: their attention shape, and which of their layers attend in drives."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from csd_spec import ModelShape
from csd_spec.model import FP16_BYTES
from host_driver.hf.adapters import ADAPTERS
from host_driver.hf.cache_argument import CACHE_ARGUMENTS
from host_driver.hf.latent import latent_modules

OLDEST_TRANSFORMERS, TOO_NEW_TRANSFORMERS = (5, 20), (5, 25)  # `./dev test --matrix` tries the ends
MAX_TOKENS = 4096  # default length of a sequence in tiers, at most
FULL = "full_attention"
SLIDING = "sliding_attention"
WINDOWS = SLIDING, "chunked_attention"
STAYING = (*WINDOWS, "linear_attention", "conv", "dummy")  # kinds of layers that use the model's own cache


class UnsupportedModelError(ValueError):
    """A model or operation that attention in drives does not support; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Window:
    """Sliding window of a layer with its own cache: maximum tokens, and bytes per token (2 per value)."""

    tokens: int
    token_bytes: int


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """Placement of a model's layers.

    Attributes:
        shape: Shape of the layers in drives.
        kinds: Kind of every layer in order, as named by transformers.
        windows: Sliding windows of layers that stay with the model. The state of linear, recurrent and convolution
            layers does not grow and is not listed.
    """

    shape: ModelShape
    kinds: tuple[str, ...]
    windows: tuple[Window, ...]

    @property
    def is_mixed(self) -> bool:
        """Whether some layers stay with the model."""
        return self.shape.layers < len(self.kinds)

    @property
    def in_drives(self) -> tuple[int, ...]:
        """Indices of the model's layers that attend in drives."""
        return tuple(number for number, kind in enumerate(self.kinds) if kind == FULL)

    def share(self, tokens: int) -> float:
        """Fraction of the KV bytes of a sequence of `tokens` tokens that is in drives."""
        there = self.shape.kv_bytes_per_token * tokens
        here = sum(window.token_bytes * min(window.tokens, tokens) for window in self.windows)
        return there / (there + here)


def unwrapped(model: Any) -> PreTrainedModel:
    """The transformers model inside of the wrappers of torch.compile and PEFT.

    Adapters are in its modules, or in what their wrapper passes to it.
    """
    model = getattr(model, "_orig_mod", model)
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) and not isinstance(model, PreTrainedModel) else model


def context_of(model: PreTrainedModel) -> int:
    """Longest sequence of a model, tokens; MAX_TOKENS if it does not say."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or MAX_TOKENS


def placement(model: PreTrainedModel) -> LayerPlacement:
    """Find the layers of a decoder with full attention, which attend in drives, and their shape.

    Raises:
        Unsupported: Drives do not support the model; the message has the reason.
    """
    config, name = _decoder(model), type(model).__name__
    if reason := (
        _cross_attention_reason(model, config)
        or _unsupported_attention_reason(model, config)
        or _unsupported_cache_reason(model)
        or _meta_reason(model)
        or _missing_config_reason(config, "num_hidden_layers", "num_attention_heads")
    ):
        raise UnsupportedModelError(f"{name} {reason}")
    kinds, windows = _kinds(config)
    _check_kinds(name, kinds, "drives")
    configs = [config] * len(kinds) if decoder_layers(config) else config.per_layer_config
    shapes = [_heads(of_layer) for of_layer in configs]
    if len({shape for shape, kind in zip(shapes, kinds, strict=True) if kind == FULL}) > 1:
        raise UnsupportedModelError(f"{name} has layers of several shapes: drives serve the same heads in every layer")
    q_heads, kv_heads, head_dim, of_v = shapes[kinds.index(FULL)]
    shape = ModelShape(
        name=getattr(config, "name_or_path", "") or name,
        layers=kinds.count(FULL),
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=of_v if of_v < head_dim else None,
    )
    if latent := latent_modules(model):
        d = latent[0].kv_lora_rank + latent[0].qk_rope_head_dim
        shape = replace(shape, kv_heads=1, head_dim=d, latent=True, v_head_dim=None)
    on_device = (
        Window(window, heads * (channels + of_v) * FP16_BYTES)
        for window, (_, heads, channels, of_v) in zip(windows, shapes, strict=True)
        if window
    )
    return LayerPlacement(shape, tuple(kinds), tuple(on_device))


def kinds_in_tiers(model: PreTrainedModel) -> tuple[str, ...]:
    """Kind of each layer of a decoder; the KV data of full-attention layers can be in tiers.

    Raises:
        Unsupported: Tiers do not support the model; the message has the reason.
    """
    config, name = _decoder(model), type(model).__name__
    if (
        reason := _cross_attention_reason(model, config)
        or _unsupported_cache_reason(model)
        or _meta_reason(model)
        or _missing_config_reason(config, "num_hidden_layers")
    ):
        raise UnsupportedModelError(f"{name} {reason}")
    kinds, _ = _kinds(config)
    _check_kinds(name, kinds, "tiers")
    return tuple(kinds)


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor number of a version."""
    return tuple(int(number) for number in version.split(".")[:2])


def _decoder(model: PreTrainedModel) -> PreTrainedConfig:
    if not (OLDEST_TRANSFORMERS <= _numbers(transformers.__version__) < TOO_NEW_TRANSFORMERS):
        oldest, too_new = (".".join(map(str, version)) for version in (OLDEST_TRANSFORMERS, TOO_NEW_TRANSFORMERS))
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} is installed, and models were tried with {oldest} and later, "
            f"below {too_new}: pip install 'transformers>={oldest},<{too_new}'"
        )
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a transformers model: pass a PreTrainedModel to attach"
        )
    return model.config.get_text_config(decoder=True)


def _check_kinds(name: str, kinds: Sequence[str], where: str) -> None:
    if other := sorted(set(kinds) - {FULL, *STAYING}):
        raise UnsupportedModelError(
            f"{name} has layers of kind {', '.join(other)}: that is neither full attention nor a window"
        )
    if FULL not in kinds:
        raise UnsupportedModelError(
            f"{name} has layers of kind {', '.join(sorted(set(kinds)))} alone: nothing is for {where}"
        )


def _kinds(config: PreTrainedConfig) -> tuple[list[str], list[int]]:
    """Kind and window length (tokens, 0 = no window) of each layer."""
    if count := decoder_layers(config):
        return [FULL] * count, [0] * count
    kinds, made_with = get_layer_types_and_kwargs(config)
    windows = [with_["sliding_window"] if kind in WINDOWS else 0 for kind, with_ in zip(kinds, made_with, strict=True)]
    return kinds, windows


def decoder_layers(config: PreTrainedConfig) -> int:
    """Layers of a decoder whose config also describes an encoder (its other numbers are the encoder's); 0 if none."""
    return getattr(config, "decoder_layers", None) or 0


def _heads(config: PreTrainedConfig) -> tuple[int, int, int, int]:
    """Query heads, KV heads, channels of keys and of values.

    The decoder's own names go first: in configs of encoder and decoder, the other names are the encoder's.
    """
    q_heads = getattr(config, "decoder_attention_heads", None) or config.num_attention_heads
    adapter = ADAPTERS.get(config.model_type)
    if adapter and adapter.kv_heads:
        kv_heads = adapter.kv_heads(config)
    else:
        kv_heads = getattr(config, "num_key_value_heads", None) or q_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // q_heads
    return q_heads, kv_heads, head_dim, getattr(config, "v_head_dim", None) or head_dim


def _has_logit_terms(model: PreTrainedModel, config: PreTrainedConfig) -> bool:
    """Whether a model has a logit cap or attention sinks, which it computes without sdpa."""
    sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
    return sinks or getattr(config, "attn_logit_softcapping", None) is not None


def _cross_attention_reason(model: PreTrainedModel, config: PreTrainedConfig) -> str:
    """Why a model attends to more than the KV data of its own tokens; empty if it does not."""
    if model.config.is_encoder_decoder:
        return "is an encoder-decoder: only decoders are served"
    if getattr(config, "add_cross_attention", False) or getattr(config, "cross_attention_layers", None):
        return "has cross-attention, to what is not in its cache: only attention to its own tokens is served"
    if getattr(config, "num_kv_shared_layers", 0):
        return "has layers that attend to other layers' keys and values (num_kv_shared_layers), which is not served"
    return ""


def _unsupported_attention_reason(model: PreTrainedModel, config: PreTrainedConfig) -> str:
    """Why a model's attention cannot be replaced; empty if it can."""
    if adapter := ADAPTERS.get(config.model_type):
        return adapter.reason(config)
    if not model._can_set_attn_implementation():
        return "does not let its attention be replaced (it does not call AttentionInterface)"
    if not model._supports_sdpa and not _has_logit_terms(model, config):
        return "cannot attend by sdpa, which attends to the prompt on the model's device"
    return ""


def _unsupported_cache_reason(model: PreTrainedModel) -> str:
    """Why a model's cache cannot be replaced; empty if it can."""
    taken = inspect.signature(model.forward).parameters
    if not any(name in taken for name in CACHE_ARGUMENTS):
        if own := [name for name in ("cache_params", "state") if name in taken]:
            return f"keeps {own[0]} instead of keys and values"
        return "takes no cache: it generates without one"
    if not getattr(model, "_supports_default_dynamic_cache", lambda: True)():
        return "keeps its state in a cache of its own kind"
    return ""


def _meta_reason(model: PreTrainedModel) -> str:
    """Why a model has no data; empty if it has some. Parameters that accelerate loads in time are also on meta."""
    if model.device.type == "meta" and not hasattr(model, "hf_device_map"):
        return "is on the meta device, which has no data: load it to a real device"
    return ""


def _missing_config_reason(config: PreTrainedConfig, *names: str) -> str:
    """Missing entries of a config; empty if complete."""
    layer = config.per_layer_config[0] if hasattr(config, "num_hidden_layers") else config
    if lacking := [name for name in names if not hasattr(layer, name)]:
        return f"has no {' and no '.join(lacking)} in its config: its attention's shape is not known"
    return ""
