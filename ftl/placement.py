"""Where the next page goes: each sequence fills blocks of its own, strided over channels and planes.

An *extent* is one block in each of W lanes, W a multiple of the channels, filled by one writer. Group g of a stream
goes to lane (start(stream) + g) mod W of its writer's extent, and lanes are numbered channel first, so a head's
consecutive groups lie on consecutive channels, whenever they were written. A first extent is about as wide as the
data that is expected fills once, later ones follow in small steps: wide for bandwidth, yet nearly full when the
sequence ends. Freeing a sequence so empties whole blocks, and nothing has to be moved.
"""

from __future__ import annotations

import heapq

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ftl.errors import OutOfSpace, ReadOnly
from ftl.nand import Nand

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: its multiples spread evenly over any range
GROWTH = 16  # a later extent is as wide as 1/16 of what the writer has written fills

I64 = NDArray[np.int64]
U32 = NDArray[np.uint32]


@njit(cache=True, nogil=True)
def _fill(starts, blocks, claimed, channels, lanes, pages_per_block, out):  # type: ignore[no-untyped-def]
    """Next pages of an extent: the wanted lane, else another of its channel, else any. Returns how many fitted."""
    width = blocks.size
    if width == 0:
        return 0
    for i in range(starts.size):
        wanted = starts[i] % width
        block = -1
        for step in range(width // channels):
            candidate = (wanted + step * channels) % width
            if claimed[blocks[candidate]] < pages_per_block:
                block = blocks[candidate]
                break
        if block < 0:
            for candidate in range(width):
                if claimed[blocks[candidate]] < pages_per_block:
                    block = blocks[candidate]
                    break
        if block < 0:
            return i
        out[i] = (block // lanes * pages_per_block + claimed[block]) * lanes + block % lanes
        claimed[block] += 1
    return starts.size


class Writer:
    """Who fills an extent: a sequence, the block namespace, the journal or garbage collection."""

    def __init__(self, expected_pages: int = 0) -> None:
        self.expected_pages, self.written = expected_pages, 0
        self.blocks: I64 = np.zeros(0, np.int64)


class Placement:
    """Free blocks by lane, the least worn first, and how many valid pages each block holds."""

    def __init__(self, nand: Nand, reserve: int) -> None:
        self.nand, self.geometry, self.reserve = nand, nand.geometry, reserve
        g = nand.geometry
        self.valid: NDArray[np.int32] = np.zeros(g.blocks, np.int32)
        self.claimed: NDArray[np.int32] = nand.next_page.copy()  # pages given out, programmed or about to be
        self.open: set[int] = set()
        # Of each lane: blocks that were erased, as (erases, block); and the first of those never used, which come first
        self._erased: list[list[tuple[int, int]]] = [[] for _ in range(g.lanes)]
        self._unused = np.zeros(g.lanes, np.int64)
        empty = (nand.next_page == 0) & (nand.bad == 0)
        self._free = empty.reshape(g.blocks_per_plane, g.lanes).sum(0)
        if nand.writes:
            self._unused[:] = g.blocks_per_plane
            for block in np.flatnonzero(empty).tolist():
                heapq.heappush(self._erased[block % g.lanes], (int(nand.erase_count[block]), block))

    @property
    def free_blocks(self) -> int:
        return int(self._free.sum())

    def _take(self, lane: int) -> int:
        """The least worn free block of a lane that has one."""
        self._free[lane] -= 1
        while self._unused[lane] < self.geometry.blocks_per_plane:
            block = int(self._unused[lane]) * self.geometry.lanes + lane
            self._unused[lane] += 1
            if not self.nand.bad[block]:
                return block
        return heapq.heappop(self._erased[lane])[1]

    def starts(self, streams: NDArray[np.uint64], groups: I64) -> I64:
        """Place of each stream's group before it is folded into an extent's width; the arguments broadcast."""
        fraction = (streams * np.uint64(_GOLDEN)) >> np.uint64(32)  # of 2^32
        start = (fraction * np.uint64(self.geometry.lanes)) >> np.uint64(32)
        return start.astype(np.int64) + groups

    def allocate(self, jobs: list[tuple[Writer, I64]], reserve: int) -> list[U32]:
        """Pages for each writer's starts (N,); extents are opened as needed, leaving `reserve` blocks free.

        Raises OutOfSpace when they do not all fit; then nothing has changed.
        """
        before = [(writer, writer.blocks, writer.written) for writer, _ in jobs]
        opened: list[I64] = []
        try:
            ppns = [self._allocate(writer, starts, reserve, opened) for writer, starts in jobs]
        except OutOfSpace:
            for writer, blocks, written in reversed(before):
                self._close(writer)
                writer.blocks, writer.written = blocks, written
            for blocks in [*opened, *(writer.blocks for writer, _ in jobs)]:
                self.claimed[blocks] = self.nand.next_page[blocks]
            for block in np.concatenate([np.zeros(0, np.int64), *opened]).tolist():
                self.release(block)
            for writer, _ in jobs:
                self.open.update(writer.blocks.tolist())
            raise
        for part in ppns:
            np.add.at(self.valid, self.nand.block_of(part), 1)
        return ppns

    def _allocate(self, writer: Writer, starts: I64, reserve: int, opened: list[I64]) -> U32:
        g, ppns, done = self.geometry, np.empty(starts.size, np.uint32), 0
        while done < starts.size:
            done += _fill(
                starts[done:], writer.blocks, self.claimed, g.channels, g.lanes, g.pages_per_block, ppns[done:]
            )
            if done < starts.size:
                blocks = self._open_extent(writer, starts.size - done, reserve)
                self._close(writer)
                writer.blocks = blocks
                opened.append(blocks)
        writer.written += starts.size
        return ppns

    def _open_extent(self, writer: Writer, wanted: int, reserve: int) -> I64:
        """One block in each of as many lanes as the data that is expected will fill, the least worn lanes first."""
        g = self.geometry
        ahead = max(wanted, writer.expected_pages - writer.written, writer.written // GROWTH)
        rows = min(max(1, -(-ahead // (g.pages_per_block * g.channels))), g.lanes // g.channels)
        rows = min(rows, max(0, self.free_blocks - reserve) // g.channels)
        by_channel = [
            sorted((lane for lane in range(channel, g.lanes, g.channels) if self._free[lane]), key=self._wear)
            for channel in range(g.channels)
        ]
        rows = min(rows, *map(len, by_channel))
        if rows == 0:
            raise OutOfSpace(f"{wanted} pages wanted, {self.free_blocks} blocks left: free sequences first")
        taken = [self._take(by_channel[channel][row]) for row in range(rows) for channel in range(g.channels)]
        self.open.update(taken)
        return np.array(taken, np.int64)

    def _wear(self, lane: int) -> tuple[int, int]:
        """Lanes with little worn blocks come first, then those with many free."""
        unused = self._unused[lane] < self.geometry.blocks_per_plane
        return 0 if unused or not self._erased[lane] else self._erased[lane][0][0], -int(self._free[lane])

    def _close(self, writer: Writer) -> None:
        self.open.difference_update(writer.blocks.tolist())
        writer.blocks = writer.blocks[:0]

    def close(self, writer: Writer) -> None:
        """The writer fills no more pages; its blocks stay as they are."""
        self._close(writer)

    def abandon(self, block: int) -> None:
        """A block went bad: nothing more is written to it."""
        self.claimed[block] = self.geometry.pages_per_block

    def invalidate(self, ppns: U32) -> I64:
        """Give pages up; returns the blocks that hold nothing valid any more and are not being filled."""
        blocks = self.nand.block_of(ppns)
        np.subtract.at(self.valid, blocks, 1)
        touched = np.unique(blocks)
        empty: I64 = touched[self.valid[touched] == 0]
        return empty

    def release(self, block: int) -> None:
        """Take an erased block back, unless it is bad."""
        self.claimed[block] = self.nand.next_page[block]
        if not self.nand.bad[block]:
            lane = block % self.geometry.lanes
            heapq.heappush(self._erased[lane], (int(self.nand.erase_count[block]), block))
            self._free[lane] += 1

    def check_alive(self) -> None:
        """Raise ReadOnly when bad blocks have eaten the spare ones."""
        g = self.geometry
        usable = g.blocks - int(self.nand.bad.sum())
        if usable < max(self.reserve + g.channels, g.blocks // 2):
            raise ReadOnly(f"{g.blocks - usable} of {g.blocks} blocks are bad: the drive is read-only")

    def victims(self, count: int) -> list[int]:
        """Closed blocks with garbage, the most of it first."""
        g = self.geometry
        written = self.nand.next_page > 0
        written[list(self.open)] = False
        closed = np.flatnonzero(written & (self.valid < g.pages_per_block))
        best = closed[np.argsort(self.valid[closed], kind="stable")[:count]]
        return [int(block) for block in best]
