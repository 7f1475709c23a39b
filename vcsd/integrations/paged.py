"""Conversion between blocks of an engine's paged KV cache and rows of a prefix, independent of the block's format."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from csd_spec import ModelShape
from csd_spec.arrays import F16


class PagedCache:
    """Layers of a paged cache, (blocks, heads, tokens, content) each.

    `content` is keys and values of a token, or its part of a block in which the engine interleaves tokens. Half of it
    is stored as K and half as V, as 2-byte values of any dtype.
    """

    def __init__(self, layers: Sequence[torch.Tensor], blocks: int, block_tokens: int) -> None:
        """Wrap an engine's cache.

        Args:
            layers: One tensor per layer.
            blocks: Number of blocks as the engine counts them; each may be several blocks of a tensor.
            block_tokens: Tokens per block.

        Raises:
            ValueError: Layers differ in shape or dtype, or have another number of dimensions.
        """
        first = layers[0]
        forms = {(tuple(layer.shape), layer.dtype) for layer in layers}
        if len(forms) > 1 or first.dim() != 4:
            raise ValueError(
                f"layers have {len(forms)} shapes or dtypes: all must be equal, (blocks, heads, tokens, content)"
            )
        self._layers = [layer.view(torch.int16) for layer in layers]
        count, self._heads, self._tokens, self._content = self._layers[0].shape
        self._parts = count // blocks  # blocks of a layer that are one of the engine's
        if self._parts * self._tokens != block_tokens or count != self._parts * blocks:
            raise ValueError(f"{count} blocks of {self._tokens} tokens: must be {blocks} blocks of {block_tokens}")

    def shape(self) -> ModelShape:
        """Shape of the rows."""
        return shape_of(len(self._layers), self._heads, self._content // 2)

    def read(self, blocks: Sequence[int]) -> tuple[F16, F16]:
        """Copy keys and values of the engine's blocks, in order, (layers, tokens, heads, d) each."""
        numbers = self._numbers(blocks)
        parts = [layer.index_select(0, numbers).cpu().numpy() for layer in self._layers]
        rows = np.stack(parts).swapaxes(2, 3)  # (layers, blocks, tokens, heads, content)
        rows = rows.reshape(len(self._layers), -1, self._heads, rows.shape[-1]).view(np.float16)
        k, v = np.split(rows, 2, axis=3)
        return np.ascontiguousarray(k), np.ascontiguousarray(v)

    def write(self, blocks: Sequence[int], k: F16, v: F16) -> None:
        """Write rows, (layers, tokens, heads, d) each, to the engine's blocks."""
        numbers = self._numbers(blocks)
        rows = np.concatenate([k, v], axis=3).view(np.int16)
        rows = rows.reshape(len(self._layers), len(numbers), self._tokens, self._heads, -1).swapaxes(2, 3)
        for layer, part in zip(self._layers, rows, strict=True):
            values = torch.from_numpy(np.ascontiguousarray(part))
            layer.index_copy_(0, numbers, values.to(layer.device))

    def _numbers(self, blocks: Sequence[int]) -> torch.Tensor:
        numbers = np.asarray(blocks, np.int64)[:, None] * self._parts + np.arange(self._parts)
        return torch.from_numpy(numbers.reshape(-1)).to(self._layers[0].device)


def shape_of(layers: int, heads: int, values: int) -> ModelShape:
    """Shape of rows with `values` 2-byte values of K, and as many of V, per head."""
    return ModelShape(name="paged", layers=layers, q_heads=heads, kv_heads=heads, head_dim=values)
