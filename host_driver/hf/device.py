"""Attention on the model's device: sdpa, plus logit terms that sdpa does not support."""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ROWS = 256  # queries per chunk, to bound the memory of logits


def attend_on_device(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    terms: dict[str, Any],
) -> torch.Tensor:
    """Compute attention on the model's device.

    Args:
        module: The attention module.
        query: (B, q_heads, new, d).
        key, value: (B, kv_heads, S, ...).
        mask: True where a query sees a token; None: causal.
        terms: Arguments of the model's layer: scaling, logit cap (softcap), and sink (s_aux) and ALiBi slope (slopes)
            of each head.

    Returns:
        Output (B, new, q_heads, d of V).
    """
    if all(terms.get(name) is None for name in ("softcap", "s_aux", "slopes")):
        if not hasattr(module, "num_key_value_groups") and key.shape[1] < query.shape[1]:
            group = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        by_sdpa: torch.Tensor = sdpa_attention_forward(module, query, key, value, mask, **terms)[0]
        return by_sdpa
    new, tokens = query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(1, 1, new, tokens, dtype=torch.bool, device=query.device)
        if terms.get("is_causal", getattr(module, "is_causal", True)) is not False:
            mask = mask.tril(tokens - new)
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scale = terms.get("scaling") or query.shape[-1] ** -0.5
    out = []
    for first in range(0, new, ROWS):
        rows = slice(first, first + ROWS)
        logits = (query[:, :, rows] @ key.transpose(2, 3)).float() * scale
        out.append(_weights(logits, mask[:, :, rows, :tokens], tokens - new + first, terms).to(value.dtype) @ value)
    return torch.cat(out, dim=2).transpose(1, 2)


def _weights(logits: torch.Tensor, mask: torch.Tensor, first: int, terms: dict[str, Any]) -> torch.Tensor:
    """Softmax of logits (B, heads, rows, S) of queries from position `first` on, with the model's terms."""
    sinks, at = terms.get("s_aux"), torch.arange(logits.shape[3], device=logits.device)
    logits = apply_cap_and_bias(logits, at[: logits.shape[2], None] + first - at, terms)
    logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)  # a finite minimum: fully masked rows give no NaN
    if sinks is None:
        return logits.softmax(-1)
    beside = sinks.to(logits).reshape(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    return torch.cat([logits, beside], dim=-1).softmax(-1)[..., :-1]


def apply_cap_and_bias(logits: torch.Tensor, behind: torch.Tensor, terms: dict[str, Any]) -> torch.Tensor:
    """Apply logit cap and ALiBi slopes; logits (..., heads, rows, S), behind (rows, S): distance of query and token."""
    cap, slopes = terms.get("softcap"), terms.get("slopes")
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    if slopes is not None:
        logits = logits - slopes.to(logits)[:, None, None] * behind
    return logits
