"""Room for new data: empty blocks are erased; where there are none, valid pages move together."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from csd_spec.arrays import U32
from ftl.errors import OutOfSpace
from ftl.flash.placement import Writer
from ftl.flash.references import remap, valid
from ftl.flash.store import FlashStore
from ftl.flash.wear import cold_blocks


class Journal(Protocol):
    """What must be known before a block is erased."""

    writers: tuple[Writer, ...]

    def record(self, start_ns: int, everything: bool) -> int:
        """Record all that changed, or only what invalidated pages; returns when that is in flash."""
        ...


class Collector:
    """Erases, collects and levels wear, always behind a record of what invalidated the pages."""

    def __init__(self, store: FlashStore, journal: Journal) -> None:
        self.store, self.journal = store, journal
        self.writer = Writer(store.geometry.channels, narrow=True)
        self.cold_writer = Writer(store.geometry.channels, narrow=True, worn_blocks=True)

    def reclaim(self, start_ns: int, everything: bool) -> int:
        """Record what was done, or at least what invalidated pages; then erase empty blocks and level wear.

        Returns when the record is in flash.
        """
        empty = self.store.placement.erasable_blocks()
        finish_ns = self.journal.record(start_ns, everything)
        for block in sorted(set(empty) & set(self.store.placement.erasable_blocks())):  # a record may have needed one
            self.store.erase(block, finish_ns)
        for block in cold_blocks(self.store):
            if not self._level(block, finish_ns):
                break
        return finish_ns

    def erase_empty(self, start_ns: int) -> bool:
        """Erase blocks without valid pages; returns whether more blocks are free than before."""
        before = self.store.placement.free_blocks
        if self.store.placement.erasable_blocks():
            self.reclaim(start_ns, everything=False)
        return self.store.placement.free_blocks > before

    def collect(self, start_ns: int, valid_fraction: float = 1.0) -> bool:
        """Empty the blocks with the most garbage, as many as give one block back per channel; False where none do.

        valid_fraction: blocks with a larger fraction of valid pages are left alone.
        """
        placement, g = self.store.placement, self.store.geometry
        victims, gained = [], 0
        for block in placement.victims(4 * g.channels):
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
        except OutOfSpace:
            pass
        empty = [block for block in victims if placement.valid[block] == 0]
        for block in empty:
            self.store.erase(block, start_ns)
        return bool(empty)  # what that gains may first be room where the next pages are moved

    def _level(self, block: int, start_ns: int) -> bool:
        """Move the data out of a block that is worn too little; False where there is no room for it."""
        placement = self.store.placement
        for writer in (*self.journal.writers, self.writer, self.cold_writer):
            if block in writer.blocks:
                placement.close(writer)
        if block not in placement.open:
            placement.seal_open_blocks(self.cold_writer, block % self.store.geometry.channels)
            try:
                self.store.counters.levelled += self._move(block, self.cold_writer, start_ns)
            except OutOfSpace:
                return False
        return True

    def _kept(self, block: int) -> U32:
        """A block's pages that somebody refers to."""
        nand = self.store.nand
        pages = nand.pages_of(block)[: nand.next_page[block]]
        return pages[valid(self.store.referrers, pages, nand.tags[pages])]

    def _move(self, block: int, writer: Writer, start_ns: int) -> int:
        """Move a block's valid pages elsewhere and leave it empty; returns how many.

        Raises OutOfSpace before anything moves.
        """
        store, nand = self.store, self.store.nand
        kept = self._kept(block)
        if store.lost_of(kept) is not None:  # moved it looks whole: whose it is has to be recorded before
            self.journal.record(start_ns, everything=False)
            kept = self._kept(block)
        assert kept.size == store.placement.valid[block], f"block {block}: {kept.size} pages are referred to"
        if kept.size:
            lanes = kept.astype(np.int64) % store.geometry.lanes
            channels = store.geometry.channels
            of_journal = max(0, min(2 * channels, store.reserve - channels))  # an extent for each of its places
            (targets,) = store.placement.allocate([(writer, lanes)], of_journal)
            data = nand.read(kept) if nand.payload else None
            numbers = nand.write_numbers[kept] if nand.payload else None
            tags = nand.tags[kept].copy()
            read_ns = store.timing.read(kept, np.full(kept.size, store.geometry.page_bytes), start_ns)
            store.program(writer, targets, data, tags, read_ns, numbers)
            remap(store.referrers, kept, targets, tags)
            store.placement.invalidate(kept)
            store.counters.moved += kept.size
        return kept.size
