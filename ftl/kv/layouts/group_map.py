"""Group maps: packing of rows into pages, the interface of all maps of a layout.

A map holds one sequence's pages of one kind. Its streams are the page sequences that grow by one group at a time: a
head of K or V, or one page of m channels of a head's embedding-indexed K.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from csd_spec import PageFormat
from csd_spec.arrays import I64, U16, U32, U64
from csd_spec.view import UNMAPPED, in_flash
from ftl.flash import tag

POISON = np.uint16(0xFFFF)  # a NaN in FP16, equal to erased flash


class GroupMap(ABC):
    """Slots of one sequence's groups of one kind.

    The *primary* maps of a layout hold all keys and values: their unfinished groups must be buffered in drive DRAM.
    The other maps are copies in another order or precision, made from the rows of the primary maps in `source`: their
    unfinished groups are buffered while there is room.

    Attributes:
        slots: Page numbers, (layers, streams, capacity).
        buffers: Page buffers of unfinished groups, (layers, streams); -1 if there is none.
    """

    per_group: int  # tokens per group
    streams: int
    source: str  # rows: "k", "v", or "kv" for rows of K followed by V
    primary: bool
    scattered: bool  # whether the (few) streams start in distant lanes
    programmed = True  # whether full groups have their own pages
    fills_pages = False  # whether full groups fill their pages completely
    rebuilt = False  # whether a group that becomes full is packed again from rows, not from its page buffers

    def __init__(self, kind: int, layout: PageFormat, layers: int, heads: int) -> None:
        self.kind, self.layout, self.heads = kind, layout, heads
        self.slots: U32 = np.full((layers, self.streams, 1), UNMAPPED)
        self.buffers: I64 = np.full((layers, self.streams), -1, np.int64)

    @property
    def group_bytes(self) -> int:
        """Bytes of a page that a full group uses."""
        return self.layout.page_bytes

    def can_buffer(self, group: int) -> bool:
        """Whether an unfinished group can be held in page buffers."""
        return True

    def begin(self, content: U16, buffers: I64, before: U16 | None) -> None:
        """Initialize the page buffers of a new group.

        Args:
            content: All page buffers.
            buffers: Buffers of the group, (streams,).
            before: Pages of the previous group, (streams, values), if they are in flash.
        """
        content[buffers] = POISON  # NaN: an accidental read shows in the result

    @abstractmethod
    def write(self, pages: U16, at: I64, position: int, rows: U16) -> None:
        """Write rows (t, H, d) that fill pages[at]; `at` is (streams, groups).

        Args:
            position: Position of the first row in its group, if part of the group was buffered.
        """

    @abstractmethod
    def fill(self, content: U16, buffers: I64, position: int, rows: U16) -> None:
        """Write rows (t, H, d) into the page buffers (streams,) of the open group, from `position` on."""

    @abstractmethod
    def fill_nan(self, content: U16, buffers: I64, position: int) -> None:
        """Overwrite the buffers with NaN from `position` of the group on."""

    def buffered(self, layer: int) -> bool:
        """Whether the unfinished group of a layer has buffers in drive DRAM."""
        return bool(self.buffers[layer, 0] >= 0)

    def reserve(self, groups: int) -> None:
        """Grow the slot table to `groups` groups."""
        capacity = self.slots.shape[2]
        if groups > capacity:
            more = np.full((*self.slots.shape[:2], groups + groups // 8 - capacity), UNMAPPED)
            self.slots = np.concatenate([self.slots, more], axis=2)

    def flash_slots(self, layer: int | slice = slice(None), first: int = 0) -> U32:
        """Physical pages of `layer` from group `first` on, flattened."""
        slots = self.slots[layer, ..., first:]
        return slots[in_flash(slots)]

    def tags(self, owner: int, layer: int, groups: I64) -> U64:
        """Spare-area tags of `groups` in every stream, (streams, groups)."""
        return tag.group_tags(self.kind, owner, layer, self.streams, groups)

    def stream_numbers(self, handle: int, layer: int) -> U64:
        """Unique numbers of the streams of a layer, (streams, 1), for placement."""
        first = ((handle * self.slots.shape[0] + layer) * tag.KINDS + self.kind) * self.streams
        return np.arange(first, first + self.streams, dtype=np.uint64)[:, None]


class InPlaceMap(GroupMap):
    """Rows are stored unmodified.

    Attributes:
        channels: Channels per page (m) if rows are stored channel by channel; 0 if row after row.
    """

    channels = 0

    def fill(self, content: U16, buffers: I64, position: int, rows: U16) -> None:
        self.write(content, buffers[:, None], position, rows)


class PackedMap(GroupMap):
    """A page is encoded from its whole group."""

    @abstractmethod
    def pack(self, rows: U16) -> U16:
        """Pack rows (groups * per_group, H, d) into pages (streams, groups, values)."""

    def write(self, pages: U16, at: I64, position: int, rows: U16) -> None:
        packed = self.pack(rows)
        pages[at, : packed.shape[2]] = packed


class PrimaryMap(GroupMap):
    """A map that holds all keys or all values, so that rows can be read back from it."""

    primary = True

    @property
    def holder(self) -> GroupMap:
        """The map whose pages hold the rows of full groups."""
        return self

    @abstractmethod
    def rows(self, banks: tuple[U16, U16], layer: int, tokens: range) -> U16:
        """Rows (tokens, H, d) of consecutive tokens of a layer."""

    @abstractmethod
    def buffered_rows(self, content: U16, layer: int, count: int) -> U16:
        """The `count` rows (count, H, d) of a layer's unfinished group, from its buffers."""
