"""Garbage collection: erases empty blocks; if there are none, moves valid pages together."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from csd_spec.arrays import U32
from ftl.errors import OutOfSpaceError
from ftl.flash.placement import Writer
from ftl.flash.references import remap, valid
from ftl.flash.store import FlashStore
from ftl.flash.wear import cold_blocks


class JournalWriter(Protocol):
    """Journal as the collector sees it: changes must be recorded before a block is erased."""

    writers: tuple[Writer, ...]

    def record(self, start_ns: int, everything: bool) -> int:
        """Record all changes, or only those that invalidated pages; returns when the record is in flash, ns."""
        ...


class GarbageCollector:
    """Erases blocks, collects garbage and levels wear, always after the invalidations have been journaled."""

    def __init__(self, store: FlashStore, journal: JournalWriter) -> None:
        self.store, self.journal = store, journal
        self.writer = Writer(store.geometry.channels, narrow=True)
        self.cold_writer = Writer(store.geometry.channels, narrow=True, worn_blocks=True)

    def reclaim(self, start_ns: int, everything: bool) -> int:
        """Record all changes (or only those that invalidated pages), then erase empty blocks and level wear.

        Returns:
            Simulated time at which the record is in flash, ns.
        """
        empty = self.store.placement.erasable_blocks()
        finish_ns = self.journal.record(start_ns, everything)
        assert finish_ns >= start_ns, "the record was in flash before it was written"
        for block in sorted(set(empty) & set(self.store.placement.erasable_blocks())):  # the record may have taken one
            self.store.erase(block, finish_ns)
        for block in cold_blocks(self.store):
            if not self._wear_level_block(block, finish_ns):
                break
        return finish_ns

    def erase_empty(self, start_ns: int) -> bool:
        """Erase blocks without valid pages; returns whether more blocks are free than before."""
        before = self.store.placement.free_blocks
        if self.store.placement.erasable_blocks():
            self.reclaim(start_ns, everything=False)
        return self.store.placement.free_blocks > before

    def collect(self, start_ns: int, valid_fraction: float = 1.0) -> bool:
        """Collect victim blocks until one block per channel is gained; returns False if no block was freed.

        valid_fraction: blocks with a larger fraction of valid pages are left alone.
        """
        placement, g = self.store.placement, self.store.geometry
        victims, gained = [], 0
        for block in placement.gc_victims(4 * g.channels):
            if placement.valid[block] > valid_fraction * g.pages_per_block:
                break
            victims.append(block)
            gained += g.pages_per_block - int(placement.valid[block])
            if gained >= g.channels * g.pages_per_block:
                break
        if gained < g.pages_per_block:
            return False
        self.journal.record(start_ns, everything=False)
        try:
            for block in victims:
                self._move(block, self.writer, start_ns)
        except OutOfSpaceError:
            pass
        empty = [block for block in victims if placement.valid[block] == 0]
        for block in empty:
            self.store.erase(block, start_ns)
        return bool(empty)  # the first block gained may be needed as the target of the next moves

    def _wear_level_block(self, block: int, start_ns: int) -> bool:
        """Move the data out of a block with low wear; returns False if there is no room for it."""
        placement = self.store.placement
        for writer in (*self.journal.writers, self.writer, self.cold_writer):
            if block in writer.blocks:
                placement.close(writer)
        if block not in placement.open:
            placement.seal_open_blocks(self.cold_writer, block % self.store.geometry.channels)
            try:
                self.store.counters.levelled += self._move(block, self.cold_writer, start_ns)
                assert self.store.counters.levelled <= self.store.counters.moved
            except OutOfSpaceError:
                return False
        return True

    def _kept(self, block: int) -> U32:
        """Valid pages of a block."""
        nand = self.store.nand
        pages = nand.pages_of(block)[: nand.next_page[block]]
        return pages[valid(self.store.referrers, pages, nand.tags[pages])]

    def _move(self, block: int, writer: Writer, start_ns: int) -> int:
        """Move the valid pages of a block and leave the block empty; returns the number of pages moved.

        Raises OutOfSpaceError before anything is moved.
        """
        store, nand = self.store, self.store.nand
        valid = self._kept(block)
        if store.find_lost(valid) is not None:  # once moved, a damaged page looks intact: journal the loss first
            self.journal.record(start_ns, everything=False)
            valid = self._kept(block)
        assert valid.size == store.placement.valid[block], f"block {block}: {valid.size} pages are referred to"
        if valid.size:
            lanes = valid.astype(np.int64) % store.geometry.lanes
            channels = store.geometry.channels
            # An extent for each of the journal's places that will soon be full
            room = [
                store.geometry.pages_per_block - store.placement.claimed[place.blocks] for place in self.journal.writers
            ]
            soon_full = sum(pages.sum() < channels * store.geometry.pages_per_block // 2 for pages in room)
            of_journal = max(0, min(soon_full * channels, store.reserve - channels))
            (targets,) = store.placement.allocate([(writer, lanes)], of_journal)
            assert not (nand.block_of(targets) == block).any(), f"block {block} takes its own pages"
            data = nand.read(valid) if nand.payload else None
            numbers = nand.write_numbers[valid] if nand.payload else None
            tags = nand.tags[valid].copy()
            read_ns = store.timing.read(valid, np.full(valid.size, store.geometry.page_bytes), start_ns)
            store.program(writer, targets, data, tags, read_ns, numbers)
            remap(store.referrers, valid, targets, tags)
            store.placement.invalidate(valid)
            store.counters.moved += valid.size
        assert store.placement.valid[block] == 0, f"block {block}: not all valid pages were moved"
        return valid.size
