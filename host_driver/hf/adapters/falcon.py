"""Falcon: rotary positions and few KV heads; its own cache has a copy of these for each query head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb


def falcon_reason(config: PreTrainedConfig) -> str:
    """Reason why a config is not supported; empty if it is."""
    return "rounds its ALiBi to BF16 before it is scaled, which drives do not support" if config.alibi else ""


def falcon_kv_heads(config: PreTrainedConfig) -> int:
    """Number of computed KV heads."""
    heads: int = config.num_kv_heads if config.new_decoder_architecture or not config.multi_query else 1
    return heads


def falcon_forward(
    interface: Callable[..., Any],
    module: Any,
    hidden_states: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    layer_past: Any = None,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Replacement of `forward`. Hidden states are (B, new, hidden). q, k and v of a KV head are adjacent rows."""
    group, d = module.num_heads // module.num_kv_heads, module.head_dim
    qkv = module.query_key_value(hidden_states).unflatten(2, (module.num_kv_heads, group + 2, d))
    query, key, value = qkv[..., :-2, :].flatten(2, 3), qkv[..., -2, :], qkv[..., -1, :]
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    if layer_past is not None:
        key, value = layer_past.update(key, value, module.layer_idx)
    out, _ = interface(module, query, key, value, attention_mask, scaling=module.inv_norm_factor)
    return module.dense(out.flatten(2)), None
