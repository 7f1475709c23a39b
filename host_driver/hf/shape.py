"""Which models can be served, the shape of their attention, and which of their layers attend in drives."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from csd_spec import ModelShape
from csd_spec.model import FP16_BYTES
from host_driver.hf.adapters import ADAPTERS
from host_driver.hf.latent import latent_modules

FULL = "full_attention"
SLIDING = "sliding_attention"
WINDOWS = SLIDING, "chunked_attention"
STAYING = (*WINDOWS, "linear_attention", "conv", "dummy")  # kinds of layers that stay with the model's own cache


class Unsupported(ValueError):
    """Something that attention in drives cannot serve, with the reason."""


@dataclass(frozen=True, slots=True)
class Window:
    """K and V that a layer keeps with the model: of at most so many tokens, bytes each (2 a value)."""

    tokens: int
    token_bytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where each layer of a model attends.

    shape: of the layers in drives. kinds: of all layers in order, as transformers names them. windows: those that stay
    with the model and keep K and V; what linear, recurrent and convolution layers keep does not grow.
    """

    shape: ModelShape
    kinds: tuple[str, ...]
    windows: tuple[Window, ...]

    @property
    def mixed(self) -> bool:
        """Whether some layers stay with the model."""
        return self.shape.layers < len(self.kinds)

    @property
    def in_drives(self) -> tuple[int, ...]:
        """Numbers of the model's layers that attend in drives."""
        return tuple(number for number, kind in enumerate(self.kinds) if kind == FULL)

    def share(self, tokens: int) -> float:
        """Of the bytes of K and V of a sequence of so many tokens, the share that is in drives."""
        there = self.shape.kv_bytes_per_token * tokens
        here = sum(window.token_bytes * min(window.tokens, tokens) for window in self.windows)
        return there / (there + here)


def placement(model: PreTrainedModel) -> Placement:
    """Which layers of a decoder attend in drives, those that attend to everything, and their shape; raises Unsupported,
    with the reason, for what drives cannot serve."""
    config, name = _decoder(model), type(model).__name__
    if reason := (
        _beyond_itself(model, config)
        or _attends_otherwise(model, config)
        or _caches_otherwise(model)
        or _lacks(config, "num_hidden_layers", "num_attention_heads")
    ):
        raise Unsupported(f"{name} {reason}")
    kinds, windows = _kinds(config)
    _check_kinds(name, kinds, "drives")
    each = [config] * len(kinds) if _decoder_layers(config) else config.per_layer_config
    shapes = [_heads(of_layer) for of_layer in each]
    if len({shape for shape, kind in zip(shapes, kinds, strict=True) if kind == FULL}) > 1:
        raise Unsupported(f"{name} has layers of several shapes: drives serve the same heads in every layer")
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
    kept = (
        Window(window, heads * (channels + of_v) * FP16_BYTES)
        for window, (_, heads, channels, of_v) in zip(windows, shapes, strict=True)
        if window
    )
    return Placement(shape, tuple(kinds), tuple(kept))


def kinds_in_tiers(model: PreTrainedModel) -> tuple[str, ...]:
    """Of each layer of a decoder its kind: K and V of those that attend to everything may lie in tiers, and the model
    attends by itself; raises Unsupported, with the reason, for what tiers cannot serve."""
    config, name = _decoder(model), type(model).__name__
    if reason := _beyond_itself(model, config) or _caches_otherwise(model) or _lacks(config, "num_hidden_layers"):
        raise Unsupported(f"{name} {reason}")
    kinds, _ = _kinds(config)
    _check_kinds(name, kinds, "tiers")
    return tuple(kinds)


def _decoder(model: PreTrainedModel) -> PreTrainedConfig:
    if not isinstance(model, PreTrainedModel):
        raise Unsupported(f"{type(model).__name__} is no model of transformers: give attach a PreTrainedModel")
    return model.config.get_text_config(decoder=True)


def _check_kinds(name: str, kinds: Sequence[str], where: str) -> None:
    if other := sorted(set(kinds) - {FULL, *STAYING}):
        raise Unsupported(f"{name} has layers of kind {', '.join(other)}: that is neither full attention nor a window")
    if FULL not in kinds:
        raise Unsupported(f"{name} has layers of kind {', '.join(sorted(set(kinds)))} alone: nothing is for {where}")


def _kinds(config: PreTrainedConfig) -> tuple[list[str], list[int]]:
    """Of each layer its kind, and the tokens of its window, 0 without one."""
    if count := _decoder_layers(config):
        return [FULL] * count, [0] * count
    kinds, made_with = get_layer_types_and_kwargs(config)
    windows = [with_["sliding_window"] if kind in WINDOWS else 0 for kind, with_ in zip(kinds, made_with, strict=True)]
    return kinds, windows


def _decoder_layers(config: PreTrainedConfig) -> int:
    """Of a decoder that began as one beside an encoder, whose numbers the others are; 0 for any other."""
    return getattr(config, "decoder_layers", None) or 0


def _heads(config: PreTrainedConfig) -> tuple[int, int, int, int]:
    """Query heads, KV heads, and their channels of K and of V. The decoder's own names first: of models that began as
    encoder and decoder, others are the encoder's."""
    q_heads = getattr(config, "decoder_attention_heads", None) or config.num_attention_heads
    adapter = ADAPTERS.get(config.model_type)
    if adapter and adapter.kv_heads:
        kv_heads = adapter.kv_heads(config)
    else:
        kv_heads = getattr(config, "num_key_value_heads", None) or q_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // q_heads
    return q_heads, kv_heads, head_dim, getattr(config, "v_head_dim", None) or head_dim


def _bends(model: PreTrainedModel, config: PreTrainedConfig) -> bool:
    """Whether a model caps its logits or has sinks beside them, for which it does without sdpa."""
    sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
    return sinks or getattr(config, "attn_logit_softcapping", None) is not None


def _beyond_itself(model: PreTrainedModel, config: PreTrainedConfig) -> str:
    """To what else than its own tokens' K and V a model attends; empty where to nothing."""
    if model.config.is_encoder_decoder:
        return "is an encoder-decoder: only decoders are served"
    if getattr(config, "add_cross_attention", False) or getattr(config, "cross_attention_layers", None):
        return "has cross-attention, to what is not in its cache: only attention to its own tokens is served"
    if getattr(config, "num_kv_shared_layers", 0):
        return "has layers that attend to other layers' K and V (num_kv_shared_layers), which is not served"
    return ""


def _attends_otherwise(model: PreTrainedModel, config: PreTrainedConfig) -> str:
    """Why a model's attention cannot be replaced; empty where it can."""
    if adapter := ADAPTERS.get(config.model_type):
        return adapter.reason(config)
    if not model._can_set_attn_implementation():
        return "does not let its attention be replaced (it does not call AttentionInterface)"
    if not model._supports_sdpa and not _bends(model, config):
        return "cannot attend by sdpa, which attends to the prompt on the model's device"
    return ""


def _caches_otherwise(model: PreTrainedModel) -> str:
    """Why a model's cache cannot be replaced; empty where it can."""
    taken = inspect.signature(model.forward).parameters
    if "past_key_values" not in taken:
        if own := [name for name in ("cache_params", "state") if name in taken]:
            return f"keeps {own[0]}, which is no K and V"
        return "takes no past_key_values: it generates without a cache"
    if not getattr(model, "_supports_default_dynamic_cache", lambda: True)():
        return "keeps its state in a cache of its own kind"
    return ""


def _lacks(config: PreTrainedConfig, *names: str) -> str:
    """What is missing in a config; empty where nothing is."""
    layer = config.per_layer_config[0] if hasattr(config, "num_hidden_layers") else config
    if lacking := [name for name in names if not hasattr(layer, name)]:
        return f"has no {' and no '.join(lacking)} in its config: its attention's shape is not known"
    return ""
