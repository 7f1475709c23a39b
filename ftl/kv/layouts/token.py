"""Token-indexed rows: a page holds n consecutive rows of one head."""

from __future__ import annotations

import numpy as np

from csd_spec import PageFormat
from csd_spec.arrays import I64, U16
from csd_spec.view import gather_rows
from ftl.kv.layouts.group_map import POISON, InPlaceMap, PrimaryMap
from ftl.kv.layouts.packing import pack_rows


class RowMap(PrimaryMap):
    """Keys or values, row after row."""

    scattered = True

    def __init__(self, kind: int, source: str, layout: PageFormat, layers: int, heads: int) -> None:
        self.per_group, self.streams, self.source = layout.n, heads, source
        super().__init__(kind, layout, layers, heads)
        self.fills_pages = self.group_bytes == layout.page_bytes

    @property
    def group_bytes(self) -> int:
        return self.layout.n * self.layout.row_bytes

    def rows(self, banks: tuple[U16, U16], layer: int, tokens: range) -> U16:
        first, last = tokens.start // self.per_group, -(-tokens.stop // self.per_group)
        before = first * self.per_group
        slots = self.slots[layer, :, first:last]
        return gather_rows(banks, slots, tokens.stop - before, self.layout).view(np.uint16)[tokens.start - before :]


class TokenMap(InPlaceMap, RowMap):
    """Rows with 2 bytes per value."""

    def write(self, pages: U16, at: I64, position: int, rows: U16) -> None:
        pack_rows(pages, at, self.per_group, position, rows)

    def fill_nan(self, content: U16, buffers: I64, position: int) -> None:
        content[buffers, position * self.layout.head_dim :] = POISON

    def buffered_rows(self, content: U16, layer: int, count: int) -> U16:
        d = self.layout.head_dim
        return content[self.buffers[layer], : count * d].reshape(self.heads, count, d).transpose(1, 0, 2)
