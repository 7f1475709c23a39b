"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): all query heads share one latent stream.

What is cached of a token is its latent and its rotary key, one row. A model expands rows to K and V of each head;
drives attend to the rows themselves: queries go out in latent space, and what comes back is expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from transformers import PreTrainedModel

MARKS = "csd_layer", "csd_rows"  # of keys of layers whose cache is ours: in drives, in rows of requests
Expand = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def latent_modules(model: PreTrainedModel) -> list[Any]:
    """Attention modules that expand what they cache."""
    return [module for module in model.modules() if callable(getattr(module, "expand_kv", None))]


@contextmanager
def in_latent_space(model: PreTrainedModel) -> Iterator[None]:
    """Let rows that our caches hold reach attention as they are cached, until the block ends."""
    modules = latent_modules(model)
    try:
        for module in modules:
            module.expand_kv = partial(_expand, module.expand_kv)
        yield
    finally:
        for module in modules:
            module.__dict__.pop("expand_kv", None)


def _expand(own: Expand, latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """latent (B, 1, new, r) and rotary keys (B, 1, new, p): those of a layer of ours as rows (B, 1, new, r + p)."""
    marks = [mark for mark in MARKS if hasattr(latent, mark)]
    if not marks:
        return own(latent, rotary)
    rows = torch.cat([latent, rotary], dim=-1)
    for mark in marks:
        setattr(rows, mark, getattr(latent, mark))
    return rows, rows


class Latent:
    """One layer's way to latent space and back, found by expanding one latent of each channel when it is needed."""

    def __init__(self, module: Any, like: torch.Tensor) -> None:
        """like: rows (B, 1, new, r + p)."""
        self._own: Expand = module.expand_kv.args[0]
        self.rotary: int = module.qk_rope_head_dim
        self.rank = like.shape[-1] - self.rotary
        self._like = like.new_empty(0)

    @cached_property
    def _absorbed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What K and V of each head are multiplied with, (heads, nope, r) and (heads, r, d of V)."""
        units = torch.eye(self.rank, dtype=self._like.dtype, device=self._like.device)[None, None]
        keys, values = self._own(units, units.new_zeros(1, 1, self.rank, self.rotary))
        return keys[0, ..., : -self.rotary].transpose(1, 2), values[0]

    def expand(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of each head, (B, heads, S, ...), of rows (B, 1, S, r + p)."""
        return self._own(rows[..., : self.rank], rows[..., self.rank :])

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """Queries (B, heads, new, nope + p) in latent space, (B, heads, new, r + p)."""
        plain, turned = query[..., : -self.rotary], query[..., -self.rotary :]
        return torch.cat([plain @ self._absorbed[0], turned], dim=-1)

    def outputs(self, out: torch.Tensor) -> torch.Tensor:
        """Outputs (B, new, heads, d of V) of those in latent space, (B, new, heads, r + p)."""
        values: torch.Tensor = out[..., : self.rank].transpose(1, 2) @ self._absorbed[1]
        return values.transpose(1, 2)
