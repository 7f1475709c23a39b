"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): all query heads share one latent stream.

The cached row of a token is its latent and its rotary key. The model expands rows to keys and values of each head.
Drives attend to the rows themselves: queries are converted to latent space, and outputs are expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from transformers import PreTrainedModel

MARK = "csd_layer"  # attribute of keys of our cache
Expand = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def latent_modules(model: PreTrainedModel) -> list[Any]:
    """Attention modules that expand cached rows."""
    return [module for module in model.modules() if callable(getattr(module, "expand_kv", None))]


@contextmanager
def in_latent_space(model: PreTrainedModel) -> Iterator[None]:
    """Pass rows of our caches to attention unexpanded, until the block ends."""
    modules = latent_modules(model)
    try:
        for module in modules:
            module.expand_kv = partial(_expand, module.expand_kv)
        yield
    finally:
        for module in modules:
            module.__dict__.pop("expand_kv", None)


def _expand(own: Expand, latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Join latents (B, 1, new, r) and rotary keys (B, 1, new, p) of our layers to rows (B, 1, new, r + p)."""
    layer = getattr(latent, MARK, None)
    if layer is None:
        return own(latent, rotary)
    rows = torch.cat([latent, rotary], dim=-1)
    setattr(rows, MARK, layer)
    return rows, rows


class Latent:
    """Conversion of one layer to latent space and back; matrices are found by expanding unit latents on first use."""

    def __init__(self, module: Any, like: torch.Tensor) -> None:
        """Create it for rows shaped like `like`, (B, 1, new, r + p)."""
        self._own: Expand = module.expand_kv.args[0]
        self.rotary: int = module.qk_rope_head_dim
        self.rank = like.shape[-1] - self.rotary
        self._like = like.new_empty(0)

    @cached_property
    def _absorbed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Matrices of keys and values of each head, (heads, nope, r) and (heads, r, d of V)."""
        units = torch.eye(self.rank, dtype=self._like.dtype, device=self._like.device)[None, None]
        keys, values = self._own(units, units.new_zeros(1, 1, self.rank, self.rotary))
        return keys[0, ..., : -self.rotary].transpose(1, 2), values[0]

    def expand(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of each head, (B, heads, S, ...), from rows (B, 1, S, r + p)."""
        return self._own(rows[..., : self.rank], rows[..., self.rank :])

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """Convert queries (B, heads, new, nope + p) to latent space, (B, heads, new, r + p)."""
        plain, turned = query[..., : -self.rotary], query[..., -self.rotary :]
        return torch.cat([plain @ self._absorbed[0], turned], dim=-1)

    def outputs(self, out: torch.Tensor) -> torch.Tensor:
        """Convert outputs in latent space (B, new, heads, r + p) to (B, new, heads, d of V)."""
        values: torch.Tensor = out[..., : self.rank].transpose(1, 2) @ self._absorbed[1]
        return values.transpose(1, 2)
