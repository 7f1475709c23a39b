"""Which models can be served, and the shape of their attention."""

from __future__ import annotations

import inspect

from transformers import PreTrainedConfig, PreTrainedModel

from csd_spec import ModelShape


class Unsupported(ValueError):
    """Something that attention in drives cannot serve, with the reason."""


def model_shape(model: PreTrainedModel) -> ModelShape:
    """The attention shape of a decoder; raises Unsupported, with the reason, for what drives cannot serve."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise Unsupported(f"{name} is no model of transformers: give attach a PreTrainedModel")
    if reason := _reason(model, model.config.get_text_config(decoder=True)):
        raise Unsupported(f"{name} {reason}")
    # the decoder's own names first: of models that began as encoder and decoder, others are the encoder's
    config = model.config.get_text_config(decoder=True)
    q_heads = getattr(config, "decoder_attention_heads", None) or config.num_attention_heads
    return ModelShape(
        name=getattr(config, "name_or_path", "") or name,
        layers=getattr(config, "decoder_layers", None) or config.num_hidden_layers,
        q_heads=q_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or q_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // q_heads,
    )


def _reason(model: PreTrainedModel, config: PreTrainedConfig) -> str:
    """Why a model cannot be served, what its architecture does first; empty where it can."""
    if model.config.is_encoder_decoder:
        return "is an encoder-decoder: only decoders are served"
    if getattr(config, "add_cross_attention", False) or getattr(config, "cross_attention_layers", None):
        return "has cross-attention, to what is not in its cache: only attention to its own tokens is served"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "caps its attention logits (attn_logit_softcapping), which drives do not do"
    if getattr(config, "num_kv_shared_layers", 0):
        return "has layers that attend to other layers' K and V (num_kv_shared_layers), which drives do not do"
    if getattr(config, "is_heterogeneous", False):
        return "has layers of several shapes (per_layer_config): drives serve the same heads in every layer"
    sliding = getattr(config, "sliding_window", None) is not None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if sliding else "full_attention"]
    if other := sorted(set(kinds) - {"full_attention"}):
        return f"has layers of kind {', '.join(other)}: only full attention is served"
    if not model._can_set_attn_implementation():
        return "does not let its attention be replaced (it does not call AttentionInterface)"
    if not model._supports_sdpa:
        return "cannot attend by sdpa, which attends to the prompt on the model's device"
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return "takes no past_key_values: it generates without a cache"
    needed = "num_hidden_layers", "num_attention_heads"
    if lacking := [name for name in needed if not hasattr(config, name)]:
        return f"has no {' and no '.join(lacking)} in its config: its attention's shape is not known"
    return ""
