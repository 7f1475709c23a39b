"""Token-indexed and embedding-indexed mapping: two ways to cut rows into pages, behind the same verbs.

A map holds one sequence's pages of one kind. Its streams are the runs of pages that grow one group at a time: a
head of K or V, or one page of m channels of a head's embedding-indexed K. A *slot* says where a group is: a
physical page number, or with bit 31 set a group buffer in drive DRAM.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from csd_spec import KvLayout
from csd_spec.view import BANK_SHIFT, UNMAPPED

DRAM_BANK = np.uint32(1 << BANK_SHIFT)
_NAN = np.uint16(0xFFFF)

I64 = NDArray[np.int64]
F16 = NDArray[np.float16]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]


class Kind(IntEnum):
    """What a page holds."""

    K = 1
    V = 2
    JOURNAL = 3
    BLOCK = 4
    EMBEDDING_K_2 = 5  # by channels a page, so that a copy with another m has tags of its own
    EMBEDDING_K_4 = 6
    EMBEDDING_K_8 = 7


class GroupMap(ABC):
    """Slots of one sequence's groups of one kind: `slots` (layers, streams, capacity), `buffers` (layers, streams)."""

    per_group: int  # tokens
    streams: int
    scattered: bool  # whether the streams, being few, begin in lanes far apart

    def __init__(self, kind: Kind, layout: KvLayout, layers: int, heads: int) -> None:
        self.kind, self.layout, self.heads = kind, layout, heads
        self.slots: U32 = np.full((layers, self.streams, 1), UNMAPPED)
        self.buffers: I64 = np.full((layers, self.streams), -1, np.int64)

    @abstractmethod
    def pack(self, rows: U16) -> U16:
        """Cut rows (groups * per_group, H, d) into pages (streams, groups, values)."""

    @abstractmethod
    def fill(self, content: U16, buffers: I64, position: int, rows: U16) -> None:
        """Write rows (t, H, d) from `position` of the group on into the page buffers of every stream."""

    @abstractmethod
    def poison(self, content: U16, buffers: I64, position: int) -> None:
        """Forget everything from `position` of the group on."""

    def buffered(self, layer: int) -> bool:
        """Whether the unfinished group of a layer has buffers in drive DRAM: K and V do once there are tokens."""
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
        return slots[slots < DRAM_BANK]

    def tags(self, owner: int, layer: int, groups: I64) -> U64:
        """Spare-area tags of every stream's `groups`, (streams, groups); see `tag`."""
        stream = np.arange(self.streams, dtype=np.uint64)[:, None] << np.uint64(20)
        tags: U64 = np.uint64(tag(self.kind, owner, layer)) | stream | groups.astype(np.uint64)[None, :]
        return tags

    def stream_numbers(self, handle: int, layer: int) -> U64:
        """Distinct numbers of the streams of a layer, (streams, 1), for placement."""
        first = ((handle * self.slots.shape[0] + layer) * len(Kind) + int(self.kind)) * self.streams
        return np.arange(first, first + self.streams, dtype=np.uint64)[:, None]


def tag(kind: Kind, owner: int, layer: int) -> int:
    """A group's tag but for stream and group: kind 3, owner 19, layer 8, stream 14, group 20 bits.

    A tag is written once: an owner never programs the same group of a layer twice, so every intact page with a tag
    holds the same data.
    """
    return int(kind) << 61 | owner << 42 | layer << 34


MAX_OWNERS, MAX_LAYERS, MAX_STREAMS, MAX_GROUPS = 1 << 19, 1 << 8, 1 << 14, 1 << 20


class TokenMap(GroupMap):
    """Token-indexed: a page is n consecutive rows of one head."""

    scattered = True

    def __init__(self, kind: Kind, layout: KvLayout, layers: int, heads: int) -> None:
        self.per_group, self.streams = layout.n, heads
        super().__init__(kind, layout, layers, heads)

    def pack(self, rows: U16) -> U16:
        by_head = rows.transpose(1, 0, 2)
        return by_head.reshape(self.heads, -1, self.per_group * self.layout.head_dim)

    def fill(self, content: U16, buffers: I64, position: int, rows: U16) -> None:
        d = self.layout.head_dim
        values = rows.transpose(1, 0, 2).reshape(self.heads, -1)
        content[buffers, position * d : position * d + values.shape[1]] = values

    def poison(self, content: U16, buffers: I64, position: int) -> None:
        content[buffers, position * self.layout.head_dim :] = _NAN


class EmbeddingMap(GroupMap):
    """Embedding-indexed: a page is m channels of one head, each for T consecutive tokens."""

    scattered = False

    def __init__(self, layout: KvLayout, layers: int, heads: int) -> None:
        if layout.m not in (2, 4, 8):
            raise ValueError(f"m = {layout.m}: an embedding page holds 2, 4 or 8 channels")
        self.per_group, self.streams = layout.T, heads * layout.embedding_pages
        super().__init__(Kind[f"EMBEDDING_K_{layout.m}"], layout, layers, heads)

    def _channels(self, rows: U16) -> U16:
        """Rows (t, H, d) as (streams, m, t); channels that a last page does not have are poisoned."""
        lay = self.layout
        spare = lay.embedding_pages * lay.m - lay.head_dim
        padded = np.pad(rows, ((0, 0), (0, 0), (0, spare)), constant_values=_NAN) if spare else rows
        return padded.transpose(1, 2, 0).reshape(self.streams, lay.m, -1)

    def pack(self, rows: U16) -> U16:
        lay = self.layout
        by_group = self._channels(rows).reshape(self.streams, lay.m, -1, lay.T)
        return by_group.transpose(0, 2, 1, 3).reshape(self.streams, -1, lay.m * lay.T)

    def fill(self, content: U16, buffers: I64, position: int, rows: U16) -> None:
        channels = content.reshape(-1, self.layout.m, self.layout.T)
        channels[buffers, :, position : position + rows.shape[0]] = self._channels(rows)

    def poison(self, content: U16, buffers: I64, position: int) -> None:
        content.reshape(-1, self.layout.m, self.layout.T)[buffers, :, position:] = _NAN


def gather_rows(banks: tuple[U16, U16], slots: U32, length: int, layout: KvLayout) -> F16:
    """Rows (length, H, d) behind token slots (H, groups)."""
    values = layout.n * layout.head_dim
    pages = np.empty((*slots.shape, values), np.uint16)
    buffered = slots >= DRAM_BANK
    pages[~buffered] = banks[0][slots[~buffered], :values]
    pages[buffered] = banks[1][slots[buffered] - DRAM_BANK, :values]
    rows = pages.reshape(slots.shape[0], -1, layout.head_dim)[:, :length]
    return np.ascontiguousarray(rows.transpose(1, 0, 2)).view(np.float16)
