"""Embedding-indexed K with few bits a value: codes between a channel's least and largest value of the page."""

from __future__ import annotations

import numpy as np

from csd_spec.arrays import U16
from ftl.kv.layouts.embedding import EmbeddingMap
from ftl.kv.layouts.group_map import PackedMap


class CodedEmbeddingMap(PackedMap, EmbeddingMap):
    """A group gets its scales when it is full; until then K alone holds its rows."""

    def waits_in(self, group: int) -> bool:
        return False

    def pack(self, rows: U16) -> U16:
        lay, levels = self.layout, (1 << self.layout.bits) - 1
        plain = np.zeros((self.streams, rows.shape[0] // lay.T, lay.m * lay.T), np.uint16)
        EmbeddingMap.write(self, plain, 0, rows)
        values = np.nan_to_num(plain.view(np.float16)).astype(np.float32).reshape(self.streams, -1, lay.m, lay.T)
        least = values.min(axis=-1).astype(np.float16)
        span = values.max(axis=-1) - least.astype(np.float32)
        scale = (span / levels).astype(np.float16)
        step = np.where(scale > 0, scale, 1).astype(np.float32)[..., None]
        codes = np.clip(np.rint((values - least.astype(np.float32)[..., None]) / step), 0, levels).astype(np.uint8)
        if lay.bits == 4:
            codes = codes[..., : lay.T // 2] | codes[..., lay.T // 2 :] << 4
        parts = [part.view(np.uint8).reshape(*codes.shape[:2], -1) for part in (scale, least, codes)]
        packed = np.concatenate(parts, axis=-1)
        return np.pad(packed, ((0, 0), (0, 0), (0, packed.shape[-1] % 2))).view(np.uint16)
