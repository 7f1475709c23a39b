"""Flash store: allocates, programs, reads and erases pages, and returns when each operation ends."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from csd_spec import DriveSpec
from csd_spec.arrays import I64, U8, U16, U32, U64
from csd_spec.view import UNMAPPED
from ftl.counters import Counters
from ftl.errors import OutOfSpaceError, UncorrectableReadError
from ftl.flash.cache import FlashPageCache
from ftl.flash.content import sorted_unique
from ftl.flash.nand import Nand
from ftl.flash.placement import Placement, Writer
from ftl.flash.plan import PagePlan
from ftl.flash.references import Referrer
from ftl.flash.timing import TIMINGS, FlashOperation, Reading

CHEAP = 0.25
"""Largest fraction of valid pages in a block that garbage collection empties before it takes over open blocks.

Chosen with `vcsd eval lifetime` (docs/lifetime.md), on the trace that it reports.
"""

GARBAGE_BYTES = 32 << 20
"""Invalid pages that may stay in flash, beside as many as are valid: more are erased, although no host flushes.

They are counted after every half of it is written, so pages take about twice a drive's data and 48 MiB of memory or
disk space; those of blocks that are still being filled come to that, and spare areas. A larger share would need more, a
smaller one would move more valid pages for random overwrites.
"""


class Reclaimer(Protocol):
    """Garbage collection, in two steps."""

    def erase_empty(self, start_ns: int) -> bool:
        """Erase blocks without valid pages; returns whether more blocks are free than before."""
        ...

    def collect(self, start_ns: int, valid_fraction: float = 1.0) -> bool:
        """Move valid pages together, and erase blocks; returns whether any was erased."""
        ...


class FlashStore:
    """NAND with its simulated time, page placement, and the layers that refer to pages."""

    def __init__(self, spec: DriveSpec, nand: Nand | None = None) -> None:
        """Raises ValueError for an unknown timing model."""
        self.spec, self.geometry = spec, spec.geometry
        self.nand = nand or Nand(spec.geometry)
        if spec.timing.model not in TIMINGS:
            raise ValueError(f"timing.model = {spec.timing.model!r}: must be one of {', '.join(TIMINGS)}")
        self.timing = TIMINGS[spec.timing.model](spec.geometry, spec.channel_timing)
        self.placement = Placement(self.nand)
        self.cache = FlashPageCache(spec.cache_bytes // spec.geometry.page_bytes, spec.geometry.pages)
        self.counters = Counters()
        self.referrers: list[Referrer] = []
        self.reclaim: Reclaimer | None = None
        self.garbage: list[int] = []  # erasable blocks found at power-on, if nothing was lost
        self._bounded_at = 0  # writes of the array when its invalid pages were last counted

    @property
    def content(self) -> U16:
        """Pages as FP16 bit patterns."""
        return self.nand.content.view(np.uint16)

    @property
    def reserve(self) -> int:
        """Blocks reserved for garbage collection and the two journal copies: an extent each, and a checkpoint."""
        g = self.geometry
        checkpoint = -(-sum(referrer.checkpoint_pages() for referrer in self.referrers) // g.pages_per_block)
        return min(3 * g.channels + checkpoint, g.blocks // 8)

    def begin(self, start_ns: int) -> None:
        """Before the first program after power-on: erase unreferenced blocks if few blocks are free.

        Frequent power losses can cause this. Later, an erase needs a journal record first, which needs free blocks.
        """
        garbage, self.garbage = self.garbage, []
        if self.placement.free_blocks <= 2 * self.reserve:
            for block in garbage:
                self.erase(block, start_ns)

    def allocate(self, jobs: list[tuple[Writer, I64]], start_ns: int, overwrites: bool = False) -> list[U32]:
        """Allocate pages for writers; frees blocks if there are too few.

        Args:
            jobs: Writers, and start positions of their pages.
            start_ns: Simulated time of the command, ns.
            overwrites: Each page replaces one that becomes invalid, so blocks reserved for overwrites may be used.

        Raises:
            OutOfSpaceError: Flash or the file system is full.
            ReadOnlyError: Too many blocks are bad.
        """
        self.placement.check_alive()
        self.begin(start_ns)
        self._bound_garbage(start_ns)
        self._check_room(sum(starts.size for _, starts in jobs), start_ns)
        reserve = self.reserve
        if not overwrites:
            reserve += sum(referrer.overwrite_blocks() for referrer in self.referrers)
        take_over = False
        while True:
            try:
                return self.placement.allocate(jobs, reserve, take_over)
            except OutOfSpaceError:
                if self.reclaim is None:
                    raise
                if self.reclaim.erase_empty(start_ns) or self.reclaim.collect(start_ns, CHEAP):
                    continue
                if not take_over:  # before valid pages are moved
                    take_over = True
                elif not self.reclaim.collect(start_ns):
                    raise

    def _bound_garbage(self, start_ns: int) -> None:
        """Erase invalid pages beyond `GARBAGE_BYTES`; valid pages among them are moved."""
        allowed = GARBAGE_BYTES // self.geometry.page_bytes
        if self.reclaim is None or self.nand.writes - self._bounded_at < allowed // 2:
            return
        self._bounded_at = self.nand.writes
        if self._excess() > allowed:
            self.reclaim.erase_empty(start_ns)
        while self._excess() > allowed and self.reclaim.collect(start_ns):
            pass

    def _excess(self) -> int:
        """Invalid pages in flash, less the valid ones."""
        return int(self.nand.next_page.sum(dtype=np.int64) - 2 * self.placement.valid.sum(dtype=np.int64))

    def _check_room(self, pages: int, start_ns: int) -> None:
        """Raise OutOfSpaceError if the file system has no room for `pages` pages plus the journal margin."""
        if not pages or self.nand.has_room(pages):
            return
        if self.reclaim and self.placement.erasable_blocks():
            self.reclaim.erase_empty(start_ns)
            self.nand.release_erased()
        if not self.nand.has_room(pages):
            raise OutOfSpaceError(f"{pages} pages: the disk under {self.nand.name} has no room for them: free some")

    def program(
        self, writer: Writer, ppns: U32, data: U8 | None, tags: U64, start_ns: int, write_numbers: U64 | None = None
    ) -> int:
        """Program pages in ascending order; a page that fails is programmed to another block, and `ppns` is updated.

        Returns:
            Simulated time at which the last program ends, ns.

        Raises:
            OutOfSpaceError: Even the reserve has no block left: all pages are freed, and `ppns` is UNMAPPED.
        """
        finish_ns = start_ns
        left = np.argsort(ppns, kind="stable")
        while left.size:
            in_order = left.size == ppns.size and bool((left[1:] > left[:-1]).all())
            page = data if data is None or in_order else data[left]
            numbers = None if write_numbers is None else write_numbers[left]
            good = self.nand.program(ppns[left], page, tags[left], numbers)
            finish_ns = max(finish_ns, self.timing.program(ppns[left[: good + 1]], start_ns))
            left = left[good:]
            if left.size:
                assert self.nand.bad[self.nand.block_of(ppns[left[:1]])[0]], "a page of a good block failed"
                self._place_elsewhere(writer, ppns, left)
                left = left[np.argsort(ppns[left], kind="stable")]
        blocks = self.nand.block_of(ppns)
        assert (self.nand.next_page[blocks] <= self.placement.claimed[blocks]).all(), "a page was not allocated"
        return finish_ns

    def _place_elsewhere(self, writer: Writer, ppns: U32, left: I64) -> None:
        """Reallocate the pages of ppns[left] that are in the block of the first one, which has become bad."""
        block = int(self.nand.block_of(ppns[left[:1]])[0])
        self.placement.seal(block)
        moved = left[self.nand.block_of(ppns[left]) == block]
        lanes = ppns[moved].astype(np.int64) % self.geometry.lanes
        try:
            self.placement.check_alive()
            (others,) = self.placement.allocate([(writer, lanes)], 0)
        except OutOfSpaceError:
            self.placement.undo_allocation(ppns)
            ppns[:] = UNMAPPED
            raise
        assert not (self.nand.block_of(others) == block).any(), f"bad block {block} takes its own pages"
        self.placement.invalidate(ppns[moved])
        ppns[moved] = others

    def all_of(self, ppns: U32) -> PagePlan:
        """Plan that reads whole pages."""
        return PagePlan.all_of(ppns, self.geometry.page_bytes)

    def page_in(self, ppns: U32) -> None:
        """Make pages resident in the emulator; takes no simulated time.

        Raises:
            UncorrectableReadError: Some pages are damaged; the affected sequences are marked as failed.
        """
        if not self.nand.page_store.lazy:
            return
        handles = self.find_lost(ppns)
        if handles is not None:
            raise UncorrectableReadError(handles, why=self.nand.page_store.io_error)

    def find_lost(self, ppns: U32) -> list[int] | None:
        """Page in pages; returns the handles of sequences that lost data, or None if all pages are intact."""
        self.nand.page_in(ppns)
        if not (self.nand.page_store.lazy and self.nand.damage.pages):
            return None
        lost = sorted_unique(ppns[~self.nand.intact(ppns)])
        return self._lose(lost, True) if lost.size else None

    def _lose(self, ppns: U32, for_good: bool) -> list[int]:
        self.counters.unrecovered += ppns.size
        tags = self.nand.tags[ppns]
        return sorted({handle for referrer in self.referrers for handle in referrer.lose(tags, for_good)})

    def read(self, plan: PagePlan, start_ns: int) -> int:
        """Read the pages of a plan into the attention engine; returns when the last one arrives, ns.

        Raises:
            UncorrectableReadError: The ECC could not correct a page; the affected sequences are marked as failed.
        """
        if plan.stored:
            self.nand.check_readable(plan.ppns)
            self.page_in(plan.ppns)
        self.counters.read += plan.ppns.size
        finish_ns = self.timing.read(plan.ppns, plan.nbytes, start_ns)
        assert finish_ns >= start_ns, "the read ends before it starts"
        if self.nand.faults.raw_bit_errors and plan.stored:
            errors = self.nand.bit_errors(plan.ppns)
            again = errors > self.nand.faults.ecc_bits
            if again.any():
                finish_ns = self.timing.read(plan.ppns[again], plan.nbytes[again], finish_ns)
            lost = plan.ppns[errors > self.nand.faults.retry_bits]
            if lost.size:
                raise UncorrectableReadError(self._lose(lost, False))
        return finish_ns

    def begin_reads(self, plans: list[PagePlan]) -> Reading | None:
        """Check and count reads that `pipeline` times itself; None if each part must go through `read`."""
        if self.timing.listener or self.timing.tracer or self.nand.faults.raw_bit_errors or not self.timing.reading:
            return None
        for plan in plans:
            if plan.stored:
                self.nand.check_readable(plan.ppns)
                self.page_in(plan.ppns)
            self.counters.read += plan.ppns.size
        return self.timing.reading

    def erase(self, block: int, start_ns: int) -> None:
        """Erase a block without valid pages, and return it to the free list."""
        assert self.placement.valid[block] == 0, f"block {block} still holds valid pages"
        assert block not in self.placement.open, f"block {block} is open"
        assert self.nand.next_page[block] > 0, f"block {block} is erased already"
        self.nand.erase(block)
        self.cache.forget(self.nand.pages_of(block))
        end_ns, timing = self.timing.erase(block % self.geometry.lanes, start_ns), self.spec.timing
        if self.timing.tracer:
            first = int(self.nand.pages_of(block)[0])
            self.timing.tracer(FlashOperation("erase", first, 0, end_ns - timing.erase_ns, end_ns))
        self.placement.release(block)
