"""Where the next group goes: heads strided over lanes, all heads batched into one superblock."""

from __future__ import annotations

from collections import deque

import numpy as np
from numba import njit
from numpy.typing import NDArray

from csd_spec import Geometry
from ftl.errors import OutOfSpace

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: its multiples spread evenly over any range

I64 = NDArray[np.int64]
U32 = NDArray[np.uint32]


@njit(cache=True, nogil=True)
def _take(wanted, written, superblocks, pages_per_block, out):  # type: ignore[no-untyped-def]
    for i in range(wanted.size):
        lane = wanted[i]
        nth, page = divmod(written[lane], pages_per_block)
        out[i] = (superblocks[nth] * pages_per_block + page) * written.size + lane
        written[lane] += 1


class Placement:
    """Superblocks being filled, with one program pointer per lane.

    Group g of a stream goes to lane (start(stream) + g) mod lanes. Lanes are numbered channel first, so a head's
    consecutive groups lie on consecutive channels, whenever they were written. Starts are spread by the golden
    ratio, so that lanes fill evenly; a lane that is ahead begins the next superblock while others finish this one.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.free: deque[int] = deque(range(geometry.blocks_per_plane))
        self.open: list[int] = []
        self.closed: set[int] = set()
        self.valid: I64 = np.zeros(geometry.blocks_per_plane, np.int64)
        self._written: I64 = np.zeros(geometry.lanes, np.int64)  # pages of each lane, from open[0] on

    def lanes_for(self, streams: NDArray[np.uint64], groups: I64) -> I64:
        """Lane of each stream's group; `streams` and `groups` broadcast."""
        fraction = (streams * np.uint64(_GOLDEN)) >> np.uint64(32)  # of 2^32
        start = (fraction * np.uint64(self.geometry.lanes)) >> np.uint64(32)
        return (start.astype(np.int64) + groups) % self.geometry.lanes

    def allocate(self, lanes: I64) -> U32:
        """The next page of each wanted lane, (N,); raises OutOfSpace before anything changes."""
        per_block = self.geometry.pages_per_block
        ends = self._written + np.bincount(lanes, minlength=self.geometry.lanes)
        missing = -(-int(ends.max()) // per_block) - len(self.open)
        if missing > len(self.free):
            raise OutOfSpace(f"{lanes.size} pages wanted, {len(self.free)} superblocks left: free sequences first")
        self.open += [self.free.popleft() for _ in range(missing)]
        ppns: U32 = np.empty(lanes.size, np.uint32)
        _take(lanes, self._written, np.array(self.open, np.int64), per_block, ppns)
        self._count(ppns, 1)
        while self._written.min() >= per_block:
            self._written -= per_block
            self.closed.add(self.open.pop(0))
        return ppns

    def invalidate(self, ppns: U32) -> None:
        """Give pages up."""
        self._count(ppns, -1)

    def take_empty(self) -> list[int]:
        """Hand out the filled superblocks that hold nothing valid any more; `release` them once erased."""
        empty = [sb for sb in self.closed if self.valid[sb] == 0]
        self.closed.difference_update(empty)
        return empty

    def release(self, superblock: int) -> None:
        """Take an erased superblock back."""
        self.free.append(superblock)

    def _count(self, ppns: U32, step: int) -> None:
        touched = np.bincount(ppns // np.uint32(self.geometry.superblock_pages), minlength=self.valid.size)
        self.valid += step * touched
