"""Baselines of a decode step in drives: KV cache in the model's own memory, and no attention at all."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import sdpa_mask

REPEATED, NONE = "sdpa-repeated", "no-attention"  # names of attentions below


class PreallocatedLayer(CacheLayerMixin):
    """Keys and values in preallocated tensors: a step writes its token in place, and the filled part is returned."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.capacity, self.length = tokens, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        shape = (*key_states.shape[:2], self.capacity, key_states.shape[3])
        self.keys, self.values = (torch.zeros(shape, dtype=key_states.dtype) for _ in range(2))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        first, self.length = self.length, self.length + key_states.shape[2]
        self.keys[:, :, first : self.length] = key_states
        self.values[:, :, first : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity


def preallocated(layers: int, tokens: int) -> Cache:
    """A cache with room for `tokens` tokens."""
    return Cache(layers=[PreallocatedLayer(tokens) for _ in range(layers)])


def _repeated(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """PyTorch's attention with keys and values repeated for each query head, as before it supported GQA."""
    groups = query.shape[1] // key.shape[1]
    keys, values = repeat_kv(key, groups), repeat_kv(value, groups)
    causal = query.shape[2] > 1 and attention_mask is None
    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(query, keys, values, attention_mask, is_causal=causal, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def _none(module: torch.nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Return zeros: measures the rest of the model."""
    return torch.zeros_like(query).transpose(1, 2), None


def register() -> None:
    """Register the attention functions of this file with transformers."""
    for name, attention in ((REPEATED, _repeated), (NONE, _none)):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, sdpa_mask)
