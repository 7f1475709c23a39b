"""Embedding-indexed K with 8 or 4 bits per value: codes between the minimum and maximum of a channel in the page."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from csd_io.compiled import njit
from csd_spec.arrays import U8, U16
from ftl.kv.layouts.codes import finite, to_16_bits, to_fp32
from ftl.kv.layouts.embedding import EmbeddingMap
from ftl.kv.layouts.group_map import PackedMap


class PackedEmbeddingMap(PackedMap, EmbeddingMap):
    """Packs whole groups: scales are known only when a group is full; until then K alone holds its rows."""

    @abstractmethod
    def parts(self, runs: U16) -> tuple[U8, ...]:
        """Parts of pages in order, each (N, bytes), for values (N, T) of one channel each."""

    def can_buffer(self, group: int) -> bool:
        return False

    def pack(self, rows: U16) -> U16:
        lay = self.layout
        groups = rows.shape[0] // lay.T
        plain = np.zeros((self.streams * groups, lay.m * lay.T), np.uint16)
        EmbeddingMap.write(self, plain, np.arange(plain.shape[0]).reshape(-1, groups), 0, rows)
        parts = self.parts(plain.reshape(-1, lay.T))
        packed = np.concatenate([part.reshape(self.streams, groups, -1) for part in parts], axis=-1)
        return np.pad(packed, ((0, 0), (0, 0), (0, packed.shape[-1] % 2))).view(np.uint16)


class CodedEmbeddingMap(PackedEmbeddingMap):
    """8- or 4-bit codes, after the scales and minimums of their channels."""

    def parts(self, runs: U16) -> tuple[U8, ...]:
        scale, least, codes = coded(runs, (1 << self.layout.bits) - 1, self.layout.bf16)
        if self.layout.bits == 4:
            half = runs.shape[1] // 2
            codes = codes[:, :half] | codes[:, half:] << np.uint8(4)
        return scale.view(np.uint8), least.view(np.uint8), codes


def coded(runs: U16, levels: int, bf16: bool) -> tuple[U16, U16, U8]:
    """Quantize runs (N, t) to `levels` + 1 values; returns scales (N,), minimums (N,) and codes (N, t)."""
    ends = np.empty((2, runs.shape[0]), np.float32)
    _ends(runs, bf16 or None, *ends)
    least, most = ends
    scale = to_16_bits((most - least) / np.float32(levels), bf16)
    steps, codes = to_fp32(scale, bf16), np.empty(runs.shape, np.uint8)
    _encode(runs, bf16 or None, least, np.where(steps > 0, steps, np.float32(1)), levels, codes)
    return scale, to_16_bits(least, bf16), codes


@njit(cache=True, nogil=True)
def _ends(runs, bf16, least, most):  # type: ignore[no-untyped-def]
    """Minimum and maximum of each run."""
    for i in range(runs.shape[0]):
        low, high = np.float32(np.inf), np.float32(-np.inf)
        for bits in runs[i]:
            value = finite(bits, bf16)
            low, high = min(low, value), max(high, value)
        least[i], most[i] = low, high


@njit(cache=True, nogil=True, error_model="numpy")
def _encode(runs, bf16, least, steps, levels, codes):  # type: ignore[no-untyped-def]
    most = np.float32(levels)
    for i in range(runs.shape[0]):
        run, low, step, line = runs[i], least[i], steps[i], codes[i]
        for t in range(run.size):
            line[t] = np.uint8(min(max(np.rint((finite(run[t], bf16) - low) / step), np.float32(0)), most))
