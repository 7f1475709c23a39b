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


KINDS, KIND_SHIFT = 32, 59  # of a tag
MAX_OWNERS, MAX_LAYERS, MAX_STREAMS, MAX_GROUPS = 1 << 17, 1 << 8, 1 << 14, 1 << 20


class Kind(IntEnum):
    """What a page holds."""

    K = 1
    V = 2
    JOURNAL = 3
    BLOCK = 4
    EMBEDDING_K = 8  # to 19: by bits and channels a page, so that a copy in another form has tags of its own


class GroupMap(ABC):
    """Slots of one sequence's groups of one kind: `slots` (layers, streams, capacity), `buffers` (layers, streams)."""

    per_group: int  # tokens
    streams: int
    scattered: bool  # whether the streams, being few, begin in lanes far apart
    waits = True  # whether an unfinished group can wait in page buffers

    def __init__(self, kind: int, layout: KvLayout, layers: int, heads: int) -> None:
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
        """Spare-area tags of every stream's `groups`, (streams, groups): where each page belongs.

        Kind 5, owner 17, layer 8, stream 14, group 20 bits. A tag is written once: an owner never programs the same
        group of a layer twice, so every intact page with a tag holds the same data.
        """
        stream = np.arange(self.streams, dtype=np.uint64)[:, None] << np.uint64(20)
        tags: U64 = (
            np.uint64(self.kind << KIND_SHIFT | owner << 42 | layer << 34) | stream | groups.astype(np.uint64)[None, :]
        )
        return tags

    def stream_numbers(self, handle: int, layer: int) -> U64:
        """Distinct numbers of the streams of a layer, (streams, 1), for placement."""
        first = ((handle * self.slots.shape[0] + layer) * KINDS + self.kind) * self.streams
        return np.arange(first, first + self.streams, dtype=np.uint64)[:, None]


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
        self.per_group, self.streams = layout.T, heads * layout.embedding_pages
        form = (16, 8, 4).index(layout.bits) * 4 + ((2, 4, 8).index(layout.m) if layout.m in (2, 4, 8) else 3)
        super().__init__(Kind.EMBEDDING_K + form, layout, layers, heads)

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


class CodedEmbeddingMap(EmbeddingMap):
    """Embedding-indexed with few bits a value: codes between a channel's least and largest value of the page.

    A group gets its scales when it is full; until then K alone holds its rows.
    """

    waits = False

    def pack(self, rows: U16) -> U16:
        lay, levels = self.layout, (1 << self.layout.bits) - 1
        values = np.nan_to_num(super().pack(rows).view(np.float16)).astype(np.float32)
        values = values.reshape(self.streams, -1, lay.m, lay.T)
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


def embedding_map(layout: KvLayout, layers: int, heads: int) -> EmbeddingMap:
    """The map of a layout's embedding-indexed copy of K."""
    return (EmbeddingMap if layout.bits == 16 else CodedEmbeddingMap)(layout, layers, heads)
