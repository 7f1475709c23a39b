"""Which models can be served, and the shape of their attention."""

from __future__ import annotations

from transformers import PreTrainedModel

from csd_spec import ModelShape


class Unsupported(ValueError):
    """Something that attention in drives cannot serve, with the reason."""


def model_shape(model: PreTrainedModel) -> ModelShape:
    """The attention shape of a decoder; raises Unsupported, with the reason, for what drives cannot serve."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise Unsupported(f"{name} is no model of transformers: give attach a PreTrainedModel")
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise Unsupported(f"{name} is an encoder-decoder: only decoders are served")
    if not model._supports_sdpa or not model._can_set_attn_implementation():
        raise Unsupported(f"{name} does not let its attention be replaced (it has no AttentionInterface with sdpa)")
    sliding = getattr(config, "sliding_window", None) is not None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if sliding else "full_attention"]
    if other := sorted(set(kinds) - {"full_attention"}):
        raise Unsupported(f"{name} has layers of kind {', '.join(other)}: only full attention is served")
    q_heads = config.num_attention_heads
    return ModelShape(
        name=getattr(config, "name_or_path", "") or name,
        layers=config.num_hidden_layers,
        q_heads=q_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or q_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // q_heads,
    )
