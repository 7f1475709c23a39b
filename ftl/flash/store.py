"""The flash store: pages are allocated, programmed, read and erased, and each says when it is done."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from csd_spec import DriveSpec
from csd_spec.arrays import I64, U8, U16, U32, U64
from csd_spec.view import UNMAPPED
from ftl.counters import Counters
from ftl.errors import OutOfSpace, Uncorrectable
from ftl.flash.cache import PageCache
from ftl.flash.content import distinct
from ftl.flash.nand import Nand
from ftl.flash.placement import Placement, Writer
from ftl.flash.plan import PagePlan
from ftl.flash.references import Referrer
from ftl.flash.timing import TIMINGS, Reading

CHEAP = 0.25  # valid pages of a block that garbage collection empties before blocks of idle writers are taken over


class Reclaim(Protocol):
    """Garbage collection, in two steps."""

    def erase_empty(self, start_ns: int) -> bool:
        """Erase blocks without valid pages; returns whether more blocks are free than before."""
        ...

    def collect(self, start_ns: int, valid_fraction: float = 1.0) -> bool:
        """Move valid pages together, and erase blocks; returns whether any was erased."""
        ...


class FlashStore:
    """NAND with its modelled time, the placement of pages, and what is known of who uses them.

    Raises ValueError for a timing model that there is none of.
    """

    def __init__(self, spec: DriveSpec, nand: Nand | None = None) -> None:
        self.spec, self.geometry = spec, spec.geometry
        self.nand = nand or Nand(spec.geometry)
        if spec.timing.model not in TIMINGS:
            raise ValueError(f"timing.model = {spec.timing.model!r}: must be one of {', '.join(TIMINGS)}")
        self.timing = TIMINGS[spec.timing.model](spec.geometry, spec.channel_timing)
        self.placement = Placement(self.nand)
        self.cache = PageCache(spec.cache_bytes // spec.geometry.page_bytes, spec.geometry.pages)
        self.counters = Counters()
        self.referrers: list[Referrer] = []
        self.reclaim: Reclaim | None = None
        self.garbage: list[int] = []  # blocks on which no record counts, as power-on has found them with nothing lost

    @property
    def content(self) -> U16:
        """Pages as FP16 bit patterns."""
        return self.nand.content.view(np.uint16)

    @property
    def reserve(self) -> int:
        """Blocks that only collection and both places of the journal may use: an extent for each, and room for a
        checkpoint."""
        g = self.geometry
        checkpoint = -(-sum(each.checkpoint_pages() for each in self.referrers) // g.pages_per_block)
        return min(3 * g.channels + checkpoint, g.blocks // 8)

    def begin(self, start_ns: int) -> None:
        """Before the first program after power-on: where power was lost so often that few blocks are left, erase those
        that held nothing then. Later a record would have to come first, and that needs blocks."""
        garbage, self.garbage = self.garbage, []
        if self.placement.free_blocks <= 2 * self.reserve:
            for block in garbage:
                self.erase(block, start_ns)

    def allocate(self, jobs: list[tuple[Writer, I64]], start_ns: int, overwrites: bool = False) -> list[U32]:
        """Pages for writers; room is made where there is none. Raises OutOfSpace, ReadOnly.

        overwrites: each takes the place of a page that is invalid then, so blocks are used that are kept for that.
        """
        self.placement.check_alive()
        self.begin(start_ns)
        self._check_room(sum(starts.size for _, starts in jobs), start_ns)
        reserve = self.reserve
        if not overwrites:
            reserve += sum(each.overwrite_blocks() for each in self.referrers)
        take_over = False
        while True:
            try:
                return self.placement.allocate(jobs, reserve, take_over)
            except OutOfSpace:
                if self.reclaim is None:
                    raise
                if self.reclaim.erase_empty(start_ns) or self.reclaim.collect(start_ns, CHEAP):
                    continue
                if not take_over:  # before valid pages are moved
                    take_over = True
                elif not self.reclaim.collect(start_ns):
                    raise

    def _check_room(self, pages: int, start_ns: int) -> None:
        """Raise OutOfSpace where the disk under the flash has no room for pages, and some for the journal."""
        if not pages or self.nand.has_room(pages):
            return
        if self.reclaim and self.placement.erasable_blocks():
            self.reclaim.erase_empty(start_ns)
            self.nand.give_back()
        if not self.nand.has_room(pages):
            raise OutOfSpace(f"{pages} pages: the disk under {self.nand.name} has no room for them: free some")

    def program(
        self, writer: Writer, ppns: U32, data: U8 | None, tags: U64, start_ns: int, write_numbers: U64 | None = None
    ) -> int:
        """Program pages in the order of their numbers; one that fails goes to another block, and ppns (N,) says so.

        Returns when the last program ends. Raises OutOfSpace where not even the reserve has a block left for them: then
        all are given back, and ppns is UNMAPPED.
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
                self._place_elsewhere(writer, ppns, left)
                left = left[np.argsort(ppns[left], kind="stable")]
        return finish_ns

    def _place_elsewhere(self, writer: Writer, ppns: U32, left: I64) -> None:
        """Give those of ppns[left] other pages that lie in the block of the first one, which is bad."""
        block = int(self.nand.block_of(ppns[left[:1]])[0])
        self.placement.seal(block)
        moved = left[self.nand.block_of(ppns[left]) == block]
        lanes = ppns[moved].astype(np.int64) % self.geometry.lanes
        try:
            self.placement.check_alive()
            (others,) = self.placement.allocate([(writer, lanes)], 0)
        except OutOfSpace:
            self.placement.give_back(ppns)
            ppns[:] = UNMAPPED
            raise
        self.placement.invalidate(ppns[moved])
        ppns[moved] = others

    def all_of(self, ppns: U32) -> PagePlan:
        """A plan for everything in these pages."""
        return PagePlan.all_of(ppns, self.geometry.page_bytes)

    def bring(self, ppns: U32) -> None:
        """Have pages at hand, wherever the emulator keeps them; that takes no modelled time. Raises Uncorrectable, and
        fails the sequences concerned, for those that are not what was programmed."""
        if not self.nand.held.lazy:
            return
        handles = self.lost_of(ppns)
        if handles is not None:
            raise Uncorrectable(handles, why=self.nand.held.trouble)

    def lost_of(self, ppns: U32) -> list[int] | None:
        """Bring pages; returns the sequences that have failed now, where some are not what was programmed."""
        self.nand.bring(ppns)
        if not (self.nand.held.lazy and self.nand.damage.pages):
            return None
        lost = distinct(ppns[~self.nand.intact(ppns)])
        return self._lose(lost, True) if lost.size else None

    def _lose(self, ppns: U32, for_good: bool) -> list[int]:
        self.counters.unrecovered += ppns.size
        tags = self.nand.tags[ppns]
        return sorted({handle for each in self.referrers for handle in each.lose(tags, for_good)})

    def read(self, plan: PagePlan, start_ns: int) -> int:
        """Bring a plan's pages to the engine; returns when all are there.

        Raises Uncorrectable, and fails the sequences concerned, where the ECC gives up.
        """
        if plan.stored:
            self.nand.check_readable(plan.ppns)
            self.bring(plan.ppns)
        self.counters.read += plan.ppns.size
        finish_ns = self.timing.read(plan.ppns, plan.nbytes, start_ns)
        if self.nand.faults.raw_bit_errors and plan.stored:
            errors = self.nand.bit_errors(plan.ppns)
            again = errors > self.nand.faults.ecc_bits
            if again.any():
                finish_ns = self.timing.read(plan.ppns[again], plan.nbytes[again], finish_ns)
            lost = plan.ppns[errors > self.nand.faults.retry_bits]
            if lost.size:
                raise Uncorrectable(self._lose(lost, False))
        return finish_ns

    def begin_reads(self, plans: list[PagePlan]) -> Reading | None:
        """Check and count reads that are timed elsewhere, part by part; None: each part has to be asked of `read`."""
        if self.timing.listener or self.nand.faults.raw_bit_errors or not self.timing.reading:
            return None
        for plan in plans:
            if plan.stored:
                self.nand.check_readable(plan.ppns)
                self.bring(plan.ppns)
            self.counters.read += plan.ppns.size
        return self.timing.reading

    def erase(self, block: int, start_ns: int) -> None:
        """Erase a block that holds nothing valid, and take it back."""
        assert self.placement.valid[block] == 0, f"block {block} still holds valid pages"
        self.nand.erase(block)
        self.cache.forget(self.nand.pages_of(block))
        self.timing.erase(block % self.geometry.lanes, start_ns)
        self.placement.release(block)
