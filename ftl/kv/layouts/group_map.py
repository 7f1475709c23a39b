"""How rows are cut into pages: what every map of a layout can do.

A map holds one sequence's pages of one kind. Its streams are the runs of pages that grow one group at a time: a
head of K or V, or one page of m channels of a head's embedding-indexed K.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from csd_spec import PageForm
from csd_spec.arrays import I64, U16, U32, U64
from csd_spec.view import UNMAPPED, in_flash
from ftl.flash import tag

POISON = np.uint16(0xFFFF)  # a NaN in FP16, as erased flash reads


class GroupMap(ABC):
    """Slots of one sequence's groups of one kind: `slots` (layers, streams, capacity), `buffers` (layers, streams).

    A layout's *primary* maps hold all rows of K and V: an unfinished group of theirs must have buffers in drive DRAM.
    The others are copies in another order or precision, made of the rows of the primary maps that `source` names: their
    unfinished groups have buffers while there is room.
    """

    per_group: int  # tokens
    streams: int
    source: str  # of its rows: "k", "v", or "kv" for those of K with those of V behind them
    primary: bool
    scattered: bool  # whether the streams, being few, begin in lanes far apart
    programmed = True  # whether full groups have pages of their own
    fills_pages = False  # whether full groups leave no byte of their pages
    rebuilt = False  # whether a group that becomes full is packed from rows, not from its page under construction

    def __init__(self, kind: int, layout: PageForm, layers: int, heads: int) -> None:
        self.kind, self.layout, self.heads = kind, layout, heads
        self.slots: U32 = np.full((layers, self.streams, 1), UNMAPPED)
        self.buffers: I64 = np.full((layers, self.streams), -1, np.int64)

    @property
    def group_bytes(self) -> int:
        """Bytes of its page that a full group fills."""
        return self.layout.page_bytes

    def waits_in(self, group: int) -> bool:
        """Whether a group, while it is unfinished, can wait in page buffers."""
        return True

    def begin(self, content: U16, buffers: I64, before: U16 | None) -> None:
        """Prepare the page buffers of a group that begins. before: pages of the group before it, (streams, values),
        where these are in flash."""
        content[buffers] = POISON  # a NaN: nobody reads it by mistake

    @abstractmethod
    def write(self, pages: U16, at: I64, position: int, rows: U16) -> None:
        """Write rows (t, H, d) that fill pages[at], `at` (streams, groups). position: of the first group, where that
        has waited in buffers."""

    @abstractmethod
    def fill(self, content: U16, buffers: I64, position: int, rows: U16) -> None:
        """Write rows (t, H, d) from `position` of the group on into the page buffers of every stream, (streams,)."""

    @abstractmethod
    def poison(self, content: U16, buffers: I64, position: int) -> None:
        """Forget everything from `position` of the group on."""

    def buffered(self, layer: int) -> bool:
        """Whether the unfinished group of a layer has buffers in drive DRAM."""
        return bool(self.buffers[layer, 0] >= 0)

    def reserve(self, groups: int) -> None:
        """Make room for `groups` groups."""
        capacity = self.slots.shape[2]
        if groups > capacity:
            more = np.full((*self.slots.shape[:2], groups + groups // 8 - capacity), UNMAPPED)
            self.slots = np.concatenate([self.slots, more], axis=2)

    def flash_slots(self, layer: int | slice = slice(None), first: int = 0) -> U32:
        """Physical pages of `layer` from group `first` on, flattened."""
        slots = self.slots[layer, ..., first:]
        return slots[in_flash(slots)]

    def tags(self, owner: int, layer: int, groups: I64) -> U64:
        """Spare-area tags of every stream's `groups`, (streams, groups): where each page belongs."""
        return tag.group_tags(self.kind, owner, layer, self.streams, groups)

    def stream_numbers(self, handle: int, layer: int) -> U64:
        """Distinct numbers of the streams of a layer, (streams, 1), for placement."""
        first = ((handle * self.slots.shape[0] + layer) * tag.KINDS + self.kind) * self.streams
        return np.arange(first, first + self.streams, dtype=np.uint64)[:, None]


class LaidMap(GroupMap):
    """Rows lie in a page as they come.

    channels: m, where they lie channel by channel; 0 where row after row.
    """

    channels = 0

    def fill(self, content: U16, buffers: I64, position: int, rows: U16) -> None:
        self.write(content, buffers[:, None], position, rows)


class PackedMap(GroupMap):
    """A page is made of its whole group."""

    @abstractmethod
    def pack(self, rows: U16) -> U16:
        """Cut rows (groups * per_group, H, d) into pages (streams, groups, values)."""

    def write(self, pages: U16, at: I64, position: int, rows: U16) -> None:
        packed = self.pack(rows)
        pages[at, : packed.shape[2]] = packed


class PrimaryMap(GroupMap):
    """A map that holds all rows of K or of V: they can be read back from it."""

    primary = True

    @property
    def holder(self) -> GroupMap:
        """The map whose pages hold the rows of full groups."""
        return self

    @abstractmethod
    def rows(self, banks: tuple[U16, U16], layer: int, tokens: range) -> U16:
        """Rows (tokens, H, d) of a layer's tokens that follow each other."""

    @abstractmethod
    def waiting(self, content: U16, layer: int, count: int) -> U16:
        """The `count` rows (count, H, d) of a layer's unfinished group, from its buffers."""
