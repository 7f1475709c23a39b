"""Embedding-indexed K in FP16: a page is m channels of one head, each for T consecutive tokens."""

from __future__ import annotations

import numpy as np

from csd_spec import KvLayout
from csd_spec.arrays import I64, U16
from ftl.flash.tag import Kind
from ftl.kv.layouts.group_map import POISON, GroupMap


class EmbeddingMap(GroupMap):
    """A copy of K, channel after channel."""

    source, primary, scattered = "k", False, False

    def __init__(self, layout: KvLayout, layers: int, heads: int) -> None:
        self.per_group, self.streams = layout.T, heads * layout.embedding_pages
        form = (16, 8, 4).index(layout.bits) * 4 + ((2, 4, 8).index(layout.m) if layout.m in (2, 4, 8) else 3)
        super().__init__(Kind.EMBEDDING_K + form, layout, layers, heads)

    def _channels(self, rows: U16) -> U16:
        """Rows (t, H, d) as (streams, m, t); channels that a last page does not have are poisoned."""
        lay = self.layout
        spare = lay.embedding_pages * lay.m - lay.head_dim
        padded = np.pad(rows, ((0, 0), (0, 0), (0, spare)), constant_values=POISON) if spare else rows
        return padded.transpose(1, 2, 0).reshape(self.streams, lay.m, -1)

    def pack(self, rows: U16) -> U16:
        lay = self.layout
        by_group = self._channels(rows).reshape(self.streams, lay.m, -1, lay.T)
        return by_group.transpose(0, 2, 1, 3).reshape(self.streams, -1, lay.m * lay.T)

    def fill(self, content: U16, buffers: I64, position: int, rows: U16) -> None:
        channels = content.reshape(-1, self.layout.m, self.layout.T)
        channels[buffers, :, position : position + rows.shape[0]] = self._channels(rows)

    def poison(self, content: U16, buffers: I64, position: int) -> None:
        content.reshape(-1, self.layout.m, self.layout.T)[buffers, :, position:] = POISON
