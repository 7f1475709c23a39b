"""Embedding-indexed K in FP16: a page holds m channels of one head, each with T consecutive tokens."""

from __future__ import annotations

from csd_spec import PageFormat
from csd_spec.arrays import I64, U16
from csd_spec.model import FP16_BYTES
from ftl.flash.tag import PageKind
from ftl.kv.layouts.group_map import POISON, InPlaceMap
from ftl.kv.layouts.packing import pack_channels_blocked


class EmbeddingMap(InPlaceMap):
    """A copy of K, stored channel by channel."""

    source, primary, scattered = "k", False, False

    def __init__(self, layout: PageFormat, layers: int, heads: int) -> None:
        self.per_group, self.streams = layout.T, heads * layout.embedding_pages
        self.channels = layout.m
        form = (16, 8, 4).index(layout.bits) * 4 + ((2, 4, 8).index(layout.m) if layout.m in (2, 4, 8) else 3)
        super().__init__(PageKind.EMBEDDING_K + form, layout, layers, heads)
        self.fills_pages = layout.T * layout.m * FP16_BYTES == layout.page_bytes and layout.head_dim % layout.m == 0

    @property
    def group_bytes(self) -> int:
        return self.layout.m * self.layout.run_bytes + self.layout.scale_bytes

    def write(self, pages: U16, at: I64, position: int, rows: U16) -> None:
        pack_channels_blocked(pages, at, self.layout.m, self.layout.T, position, rows)

    def fill_nan(self, content: U16, buffers: I64, position: int) -> None:
        content.reshape(-1, self.layout.m, self.layout.T)[buffers, :, position:] = POISON
