"""MPT: ALiBi (arXiv 2108.12409) with another order of heads than BLOOM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from host_driver.hf.cache_argument import CACHE_ARGUMENTS


def mpt_forward(
    interface: Callable[..., Any],
    module: Any,
    hidden_states: torch.Tensor,
    position_bias: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Replacement of `forward`; hidden states (B, new, hidden), attention_mask True where a query sees a token."""
    qkv = module.Wqkv(hidden_states)
    if module.clip_qkv:
        qkv = qkv.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = qkv.unflatten(2, (3, module.n_heads, module.head_dim)).permute(2, 0, 3, 1, 4)
    cache = next((kwargs[name] for name in CACHE_ARGUMENTS if kwargs.get(name) is not None), None)
    if cache is not None:
        key, value = cache.update(key, value, module.layer_idx)
    slopes = None if position_bias is None else -build_mpt_alibi_tensor(module.n_heads, 2)[:, 0, 0]
    out, _ = interface(module, query, key, value, attention_mask, scaling=module.softmax_scale, slopes=slopes)
    return module.out_proj(out.flatten(2)), None
