"""BLOOM: ALiBi (arXiv 2108.12409); its attention adds the residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor, dropout_add


def bloom_forward(
    interface: Callable[..., Any],
    module: Any,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    layer_past: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Replacement of `forward`. Hidden states and residual are (B, new, hidden)."""
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    if layer_past is not None:
        key, value = layer_past.update(key, value, module.layer_idx)
    scaling = module.inv_norm_factor
    out, _ = interface(module, query, key, value, attention_mask, scaling=scaling, slopes=_slopes(module.num_heads))
    out = module.dense(out.flatten(2))
    return dropout_add(out, residual, module.hidden_dropout, module.training), None


def _slopes(heads: int) -> torch.Tensor:
    """ALiBi slope of each head, subtracted from a logit per token of distance, (heads,)."""
    distances_1_and_0 = torch.ones(1, 2, device="cpu")
    biases: torch.Tensor = build_alibi_tensor(distances_1_and_0, heads, torch.float32)
    return biases[:, 0, 1]
