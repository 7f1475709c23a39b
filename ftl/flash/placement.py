"""Page placement: each sequence fills its own blocks, striped over channels and planes.

An *extent* is one block in each of W lanes, W a multiple of the channels, filled by one writer. Group g of a stream
is placed on channel start(stream) + g, so consecutive groups of a head are on consecutive channels, whenever they were
written. While few blocks are open, an extent takes all lanes, for bandwidth. Later, a first extent is about as wide as
the expected data fills once, and more follow in small steps: still wide, yet nearly full when the sequence ends.
Freeing a sequence therefore empties whole blocks, and no valid pages have to be moved. When no block is free, a writer
may take over partly filled blocks of an idle one (`Placement.allocate`).
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from csd_io.compiled import njit
from csd_spec.arrays import I32, I64, U8, U32, U64
from csd_spec.view import UNMAPPED
from ftl.errors import OutOfSpaceError, ReadOnlyError
from ftl.flash.nand import Nand

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: its multiples spread evenly over any range
GROWTH = 32  # growth divisor of a sequence's writer
OPEN_SHARE = 16  # up to 1/16 of all blocks may be open, mostly empty, for the bandwidth of small sequences


@njit(cache=True, nogil=True, error_model="numpy")
def _fill(starts, blocks, claimed, lanes, pages_per_block, out):  # type: ignore[no-untyped-def]
    """Take the next pages of a writer: in the requested row of the channel, else in its emptiest row.

    Returns the number of pages that fitted.
    """
    rows, channels = blocks.shape
    for i in range(starts.size):
        channel = starts[i] % channels
        block = blocks[starts[i] // channels % rows, channel]
        if claimed[block] == pages_per_block:
            for row in range(rows):
                if claimed[blocks[row, channel]] < claimed[block]:
                    block = blocks[row, channel]
        if claimed[block] == pages_per_block:
            return i
        out[i] = (block // lanes * pages_per_block + claimed[block]) * lanes + block % lanes
        claimed[block] += 1
    return starts.size


@njit(cache=True, nogil=True, error_model="numpy")
def _count(ppns, seen, valid, lanes, superblock_pages):  # type: ignore[no-untyped-def]
    for i in range(ppns.size):
        ppn = np.int64(ppns[i])
        if not seen[ppn]:
            seen[ppn] = 1
            valid[ppn // superblock_pages * lanes + ppn % lanes] += 1


class Writer:
    """Owner of extents: a sequence, the block namespace, the journal or garbage collection.

    Attributes:
        blocks: Open blocks, (rows, channels).
        growth: An extent holds at least 1/growth of the pages written so far; 0 disables this.
        narrow: Always one block per channel.
        worn_blocks: Take worn blocks, for cold data.
        lends: Another writer may take over its open blocks when no block is free.
    """

    def __init__(
        self, channels: int, growth: int = 0, narrow: bool = False, worn_blocks: bool = False, lends: bool = False
    ) -> None:
        self.expected_pages, self.written, self.growth = 0, 0, growth
        self.narrow, self.worn_blocks, self.lends = narrow, worn_blocks, lends
        self.blocks: I64 = np.zeros((0, channels), np.int64)


class Placement:
    """Free blocks by lane, least worn first, and the valid count of each block."""

    def __init__(self, nand: Nand) -> None:
        self.nand, self.geometry = nand, nand.geometry
        g = nand.geometry
        self.valid: I32 = np.zeros(g.blocks, np.int32)
        self.claimed: I32 = nand.next_page.copy()  # pages allocated, programmed or not
        self.open: set[int] = set()
        self._lenders: dict[Writer, None] = {}  # writers with open blocks that lend them, least recently used first
        # Per lane: erased free blocks as (erases, block), and the first never-used row; unused blocks are taken first
        self._erased: list[list[tuple[int, int]]] = [[] for _ in range(g.lanes)]
        self._unused = np.zeros(g.lanes, np.int64)
        self._stride = next(n for n in range(g.lanes * 5 // 8, 2 * g.lanes) if math.gcd(n, g.lanes) == 1)
        empty = (nand.next_page == 0) & (nand.bad == 0)
        self._free = empty.reshape(g.blocks_per_plane, g.lanes).sum(0)
        used = np.flatnonzero((nand.next_page > 0) | (nand.erase_count > 0))
        if used.size:
            self._unused[:] = int(used[-1]) // g.lanes + 1
            for block in np.flatnonzero(empty[: int(self._unused[0]) * g.lanes]).tolist():
                heapq.heappush(self._erased[block % g.lanes], (int(nand.erase_count[block]), block))

    @property
    def free_blocks(self) -> int:
        return int(self._free.sum())

    def _take(self, lane: int, worn: bool = False) -> int:
        """Take the least worn free block of a lane; with `worn`, a worn one, but none with the maximum erase count."""
        assert self._free[lane] > 0, f"lane {lane} has no free block"
        self._free[lane] -= 1
        erased = self._erased[lane]
        most = max((each for each in erased if each[0] < self.nand.erase_count.max()), default=None) if worn else None
        if most:
            erased.remove(most)
            heapq.heapify(erased)
            return most[1]
        while self._unused[lane] < self.geometry.blocks_per_plane:
            block = int(self._unused[lane]) * self.geometry.lanes + lane
            self._unused[lane] += 1
            if not self.nand.bad[block]:
                return block
        return heapq.heappop(erased)[1]

    def starts(self, streams: U64, groups: I64, scattered: bool) -> I64:
        """Start position of each stream's group, before it is folded into an extent's width; arguments broadcast.

        Args:
            scattered: For few streams: hash them to distant lanes. Otherwise streams take lanes round robin, and each
                round is shifted, so that equal channels of many heads do not collide.
        """
        if not scattered:
            rounds = streams.astype(np.int64) // self.geometry.lanes
            return streams.astype(np.int64) * self._stride + rounds * (self._stride // 4 + 1) + groups
        fraction = (streams * np.uint64(_GOLDEN)) >> np.uint64(32)  # in units of 2^-32
        start = (fraction * np.uint64(self.geometry.lanes)) >> np.uint64(32)
        return start.astype(np.int64) + groups

    def allocate(self, jobs: list[tuple[Writer, I64]], reserve: int, take_over: bool = False) -> list[U32]:
        """Allocate pages for each writer's starts (N,), opening extents as needed; keeps `reserve` blocks free.

        Args:
            jobs: Writers and their starts.
            reserve: Blocks that stay free.
            take_over: If no block is free, continue the partly filled blocks of idle writers that lend them.

        Raises:
            OutOfSpaceError: They do not all fit; nothing has changed.
        """
        before = [(writer, writer.blocks, writer.written, self.claimed[writer.blocks]) for writer, _ in jobs]
        opened, lent = list[I64](), list[tuple[Writer, I64, I32]]()
        for writer, _ in jobs:
            self._lenders.pop(writer, None)  # its blocks are in use
        try:
            ppns = [
                self._allocate(writer, starts, reserve, opened, lent if take_over else None) for writer, starts in jobs
            ]
        except OutOfSpaceError:
            for writer, blocks, written, claimed in reversed(before):
                writer.blocks, writer.written, self.claimed[blocks] = blocks, written, claimed
                self.open.update(blocks.ravel().tolist())
            for lender, blocks, claimed in lent:
                lender.blocks, self.claimed[blocks] = blocks, claimed
                self.open.update(blocks.ravel().tolist())
            for block in [block for blocks in opened for block in blocks.ravel().tolist()]:
                self.open.discard(block)
                self.release(block)
            raise
        finally:
            users = [*(each[0] for each in before), *(each[0] for each in lent)]
            self._lenders |= {writer: None for writer in users if writer.lends and writer.blocks.size}
        for part in ppns:
            blocks = self.nand.block_of(part)
            np.add.at(self.valid, blocks, 1)
            assert (self.valid[blocks] <= self.claimed[blocks]).all(), (
                "a block has more valid pages than allocated ones"
            )
        return ppns

    def _allocate(
        self, writer: Writer, starts: I64, reserve: int, opened: list[I64], lent: list[tuple[Writer, I64, I32]] | None
    ) -> U32:
        g, ppns, done = self.geometry, np.empty(starts.size, np.uint32), 0
        while done < starts.size:
            room = (self.claimed[writer.blocks] < g.pages_per_block).any(axis=1)
            if not room.all():
                self.open.difference_update(writer.blocks[~room].ravel().tolist())
                writer.blocks = writer.blocks[room]
            if writer.blocks.size:
                done += _fill(starts[done:], writer.blocks, self.claimed, g.lanes, g.pages_per_block, ppns[done:])
            if done < starts.size and writer.narrow and writer.blocks.size:
                self._top_up(writer, int(starts[done]) % g.channels, reserve, opened)
            elif done < starts.size and lent is not None and self._lenders and self._is_full(reserve):
                lent.append(self._take_over())
                writer.blocks = np.concatenate([writer.blocks, lent[-1][1]])
            elif done < starts.size:
                opened.append(self._open_extent(writer, starts.size - done, reserve))
                writer.blocks = np.concatenate([writer.blocks, opened[-1]])
        writer.written += starts.size
        return ppns

    def _is_full(self, reserve: int) -> bool:
        """Whether no extent can be opened."""
        return self.free_blocks - reserve < self.geometry.channels

    def _take_over(self) -> tuple[Writer, I64, I32]:
        """Take the open blocks of the lender that was used least recently.

        Returns:
            The lender, its blocks (rows, channels), and the claimed pages of each.
        """
        lender = next(iter(self._lenders))
        del self._lenders[lender]
        blocks, lender.blocks = lender.blocks, lender.blocks[:0]
        assert lender.lends and self.open.issuperset(blocks.ravel().tolist())
        return lender, blocks, self.claimed[blocks]

    def _top_up(self, writer: Writer, channel: int, reserve: int, opened: list[I64]) -> None:
        """Replace the writer's full block of one channel."""
        lanes = [lane for lane in range(channel, self.geometry.lanes, self.geometry.channels) if self._free[lane]]
        if self.free_blocks <= reserve:
            raise OutOfSpaceError(f"{self.free_blocks} blocks left: free sequences first")
        lane = min(lanes, key=self._wear) if lanes else int(self._free.argmax())
        block = self._take(lane, writer.worn_blocks)
        assert block not in self.open, f"block {block} is in two extents"
        self._check_erased([block])
        self.open.add(block)
        self.open.discard(int(writer.blocks[0, channel]))
        opened.append(np.array([[block]]))
        writer.blocks = writer.blocks.copy()
        writer.blocks[0, channel] = block

    def _open_extent(self, writer: Writer, wanted: int, reserve: int) -> I64:
        """Open blocks (rows, channels) in as many lanes as the expected data fills, least worn lanes first."""
        g = self.geometry
        growth = writer.written // writer.growth if writer.growth else 0
        ahead = max(wanted, writer.expected_pages - writer.written, growth)
        rows = min(max(1, -(-ahead // (g.pages_per_block * g.channels))), g.lanes // g.channels)
        if writer.narrow:
            rows = 1
        elif len(self.open) + g.lanes <= g.blocks // OPEN_SHARE <= self.free_blocks:
            rows = g.lanes // g.channels  # few blocks are open: use all lanes, for bandwidth
        rows = min(rows, max(0, self.free_blocks - reserve) // g.channels)
        by_channel = [
            sorted((lane for lane in range(channel, g.lanes, g.channels) if self._free[lane]), key=self._wear)
            for channel in range(g.channels)
        ]
        if rows == 0:
            raise OutOfSpaceError(f"{wanted} pages wanted, {self.free_blocks} blocks left: free sequences first")
        rows = min(rows, *map(len, by_channel))
        if rows:
            taken = [self._take(by_channel[channel][row]) for row in range(rows) for channel in range(g.channels)]
        else:  # a channel has no free block: use the other channels
            taken = [self._take(int(self._free.argmax())) for _ in range(g.channels)]
        assert self.open.isdisjoint(taken) and len(set(taken)) == len(taken), "a block is in two extents"
        self._check_erased(taken)
        blocks = np.array(taken, np.int64).reshape(-1, g.channels)
        self.open.update(blocks.ravel().tolist())
        return blocks

    def _check_erased(self, blocks: list[int]) -> None:
        """Assert that free blocks are erased, good and without valid pages when they are opened."""
        nand = self.nand
        assert not nand.next_page[blocks].any() and not nand.bad[blocks].any(), f"blocks {blocks}: one is not free"
        assert not self.valid[blocks].any() and not self.claimed[blocks].any(), f"blocks {blocks}: one has pages"

    def _wear(self, lane: int) -> tuple[int, int]:
        """Sort key of a lane: least worn first, then most free blocks."""
        unused = self._unused[lane] < self.geometry.blocks_per_plane
        return 0 if unused or not self._erased[lane] else self._erased[lane][0][0], -int(self._free[lane])

    def close(self, writer: Writer) -> None:
        """Stop filling the writer's open blocks."""
        blocks = writer.blocks.ravel().tolist()
        assert self.open.issuperset(blocks), "a writer has a block that is not open"
        self.open.difference_update(blocks)
        for block in blocks:
            if self.nand.next_page[block] == 0:
                self.release(block)
        writer.blocks = writer.blocks[:0]
        self._lenders.pop(writer, None)

    def undo_allocation(self, ppns: U32) -> None:
        """Undo an allocation that was not fully programmed; UNMAPPED pages were returned before."""
        ppns = ppns[ppns != UNMAPPED]
        self.invalidate(ppns)
        blocks = np.unique(self.nand.block_of(ppns))
        assert (self.nand.next_page[blocks] <= self.claimed[blocks]).all(), "a page was programmed unallocated"
        good = blocks[self.nand.bad[blocks] == 0]
        self.claimed[good] = self.nand.next_page[good]

    def seal_open_blocks(self, writer: Writer, channel: int) -> None:
        """Seal a writer's open blocks of a channel, so that its next pages go to another block."""
        for block in writer.blocks[:, channel].tolist():
            if self.nand.next_page[block]:
                self.seal(block)

    def seal(self, block: int) -> None:
        """Close a block to further writes."""
        self.claimed[block] = self.geometry.pages_per_block

    def invalidate(self, ppns: U32) -> None:
        """Mark pages as no longer referenced."""
        blocks = self.nand.block_of(ppns)
        np.subtract.at(self.valid, blocks, 1)
        assert ppns.size == 0 or self.valid[blocks].min() >= 0, "a page was invalidated twice"

    def count(self, ppns: U32, seen: U8) -> None:
        """Count pages that are in use at power-on, each once; `seen` (pages,) marks pages already counted."""
        _count(ppns, seen, self.valid, self.geometry.lanes, self.geometry.superblock_pages)

    def erasable_blocks(self) -> list[int]:
        """Written blocks without valid pages that are not open."""
        used = int(self._unused.max()) * self.geometry.lanes  # later blocks were never written
        blocks = np.flatnonzero((self.valid[:used] == 0) & (self.nand.next_page[:used] > 0)).tolist()
        return [block for block in blocks if block not in self.open]

    def release(self, block: int) -> None:
        """Return an erased block to the free list, unless it is bad."""
        assert block not in self.open and self.nand.next_page[block] == 0, f"block {block} is in use"
        assert self.valid[block] == 0, f"block {block} holds valid pages"
        self.claimed[block] = self.nand.next_page[block]
        if not self.nand.bad[block]:
            lane = block % self.geometry.lanes
            heapq.heappush(self._erased[lane], (int(self.nand.erase_count[block]), block))
            self._free[lane] += 1
            assert self._free[lane] <= self.geometry.blocks_per_plane, f"block {block} was released twice"

    @property
    def alive(self) -> bool:
        """Whether enough good blocks are left to write."""
        g = self.geometry
        return g.blocks - self.nand.bad_blocks >= max(4 * g.channels, g.blocks // 2)

    def check_alive(self) -> None:
        """Raise ReadOnlyError if too many blocks are bad."""
        if not self.alive:
            raise ReadOnlyError(
                f"{self.nand.bad_blocks} of {self.geometry.blocks} blocks are bad: the drive is read-only"
            )

    def gc_victims(self, count: int) -> list[int]:
        """Closed blocks with invalid pages, fewest valid pages first."""
        g = self.geometry
        written = self.nand.next_page > 0
        written[list(self.open)] = False
        closed = np.flatnonzero(written & (self.valid < g.pages_per_block))
        best = closed[np.argsort(self.valid[closed], kind="stable")[:count]]
        return [int(block) for block in best]
