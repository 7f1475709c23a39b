"""GPT-J and CodeGen: the attention of q, k and v is a separate method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def inner_attention(
    interface: Callable[..., Any],
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """Replacement of `_attn`. query, key and value are (B, heads, S, d); returns (B, heads, new, d)."""
    out, _ = interface(module, query, key, value, attention_mask, scaling=1 / float(module.scale_attn))
    return out.transpose(1, 2), None
