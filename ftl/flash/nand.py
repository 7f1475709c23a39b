"""NAND array: content, spare areas, and the rules of program and erase."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from csd_io.crc import crc32
from csd_io.folder import Folder, suggest_fix
from csd_io.medium import IN_MEMORY, Medium
from csd_spec import Geometry
from csd_spec.arrays import I32, I64, U8, U32, U64
from ftl.errors import MediaFailedError, NandRuleError
from ftl.flash.content import NONE, open_page_store, sorted_unique
from ftl.flash.damage import ArrayDamage
from ftl.flash.faults import FaultPlan
from ftl.flash.files import NandFiles, correct_entries, runs
from ftl.flash.memory import reserve_zeros
from ftl.flash.operations import Erase, Operation, Program
from ftl.flash.program_order import claim_pages, first_unwritten, list_programmed
from ftl.flash.spare import SPARE, Spare, build_spares, correct_page, correct_single_bit_errors, keep_present_life

MARGIN_BYTES = 16 << 20  # disk space kept free for the journal and small files


class Nand:
    """Pages that are programmed once and in order within their block, and erased by block.

    The spare area of a page holds a logical tag, the number of the write that filled it (from 1; 0 is erased) and
    checksums (`ftl.flash.spare`). All other state belongs to the controller and is lost at power-off.
    """

    def __init__(
        self,
        geometry: Geometry,
        faults: FaultPlan | None = None,
        payload: bool = True,
        folder: Folder | None = None,
        private: bool = False,
        medium: Medium = IN_MEMORY,
    ) -> None:
        """Open an array.

        Args:
            payload: False keeps tags only: time and wear of drives whose content would not fit this machine.
            folder: Folder of the array's files, read now and written on every change; None keeps the array in memory.
            private: Open the files read-only, even if truncated; changes stay in memory.
            medium: Storage of the content at run time. With a file-backed medium, a page is checked when it is first
                paged in, and must not be accessed before.

        Raises:
            ValueError: A file has a wrong size.
            OSError: A file cannot be read.
        """
        self.geometry, self.faults, self.payload = geometry, faults or FaultPlan(), payload
        pages = geometry.pages
        files = None if folder is None else NandFiles(folder, geometry, allow_truncated=private)
        path = Path(folder.name) if folder is not None and not private else None
        self.page_store = open_page_store(medium, geometry, pages if payload else 1, path)
        self.content: U8 = self.page_store.pages
        self._unchecked: U8 = reserve_zeros((pages if self.page_store.lazy else 0,), np.uint8)
        self.spare: Spare = reserve_zeros((pages if payload else 0,), SPARE)
        self.tags: U64 = self.spare["tag"] if payload else reserve_zeros((pages,), np.uint64)
        self.write_numbers: U64 = self.spare["write_number"]
        self.erase_count: I32 = reserve_zeros((geometry.blocks,), np.int32)
        self.bad: U8 = reserve_zeros((geometry.blocks,), np.uint8)
        self.next_page: I32 = reserve_zeros((geometry.blocks,), np.int32)
        self.log: Callable[[Operation], None] | None = None  # called before or after every change of the array
        self.damage, self.writes = ArrayDamage(), 0
        self.failed = ""  # reason why the files can no longer be written; empty if they can
        self._erased: list[int] = []  # erased blocks whose memory is not yet released
        self._unsynced = False
        self._generator = np.random.default_rng(self.faults.seed)
        self._files: NandFiles | None = None
        if files is not None:
            self._load(files, private)
        if self.faults.factory_bad and not self.bad.any():
            self.bad[self._generator.random(geometry.blocks) < self.faults.factory_bad] = 1
        self.bad_blocks = int(np.count_nonzero(self.bad))  # cached: needed at every write

    def _load(self, files: NandFiles, private: bool) -> None:
        self.damage.files += files.wrong
        entries = files.read_blocks()
        fixed, lost = correct_entries(entries)
        self.damage.blocks.update(lost)
        entries["bad"][lost] = 0
        entries["erases"][lost] = 0
        self.erase_count[:], self.bad[:] = entries["erases"], entries["bad"] != 0
        taken = list[int]()
        areas = np.union1d(self._read_spares(files.read_spares(self.spare, taken)), taken).astype(np.uint32)
        ppns, wrong = self.programmed(), NONE
        if self.page_store.lazy:
            self._unchecked[ppns] = 1
        else:
            ppns.sort()
            files.read_content(self.content, ppns)
            wrong = self._check_content(ppns)
        self.damage.corrected = len(fixed) + areas.size + wrong.size
        if not private:
            self._files = files
            with suppress(MediaFailedError):  # memory is correct; `failed` rejects later writes
                if not files.same_generation:
                    self._write_generation(files.generation)
                    self.sync()  # before the next generation: files that belong together differ by at most one
                for block in (*fixed, *lost):
                    self._write_block(block)
                self._write_spares(areas)
                self._write(wrong, self.content[wrong])

    def power_on(self) -> None:
        """Rebuild the controller's state from the spare areas: programmed pages, and the damaged ones among them."""
        self.damage = ArrayDamage()
        spares = self._read_spares(range(self.geometry.blocks_per_plane))
        self.damage.corrected = spares.size + self._check_content(self.programmed()).size

    def _read_spares(self, superblocks: Iterable[int]) -> U32:
        """Find the programmed pages of these superblocks; returns pages whose spare areas were corrected."""
        g, fixed = self.geometry, list[int]()
        self.writes = 0
        for superblock in superblocks:
            first = superblock * g.superblock_pages
            spare = self.spare[first : first + g.superblock_pages]
            corrected_areas, lost = correct_single_bit_errors(spare)
            fixed += [first + i for i in corrected_areas]
            self.damage.spares.update(first + i for i in lost)
            blocks = slice(superblock * g.lanes, (superblock + 1) * g.lanes)
            unreadable = [ppn - first for ppn in self.damage.spares if ppn // g.superblock_pages == superblock]
            newest = keep_present_life(spare, unreadable, self.erase_count[blocks], self.next_page[blocks])
            self.writes = max(self.writes, newest)
        return np.array(sorted(fixed), np.uint32)

    def _check_content(self, ppns: U32) -> U32:
        """Find damaged pages among programmed ones; returns the pages that were corrected."""
        fixed = []
        checksums = np.array([crc32(self.content[ppn]) for ppn in ppns.tolist()], np.uint32)
        for ppn in ppns[(checksums != self.spare["crc"][ppns]) | (self.write_numbers[ppns] == 0)].tolist():
            page, spare = self.content[ppn].copy(), self.spare[ppn]
            if spare["write_number"] and correct_page(page, spare):
                fixed.append(ppn)
                self.page_store.write(np.array([ppn], np.uint32), page[None])
                if self.page_store.lazy and not self.failed:
                    self._write(np.array([ppn], np.uint32), page[None])
            else:
                self.damage.pages.add(ppn)
        return np.array(fixed, np.uint32)

    def page_in(self, ppns: U32) -> None:
        """Make the content of programmed pages resident until the next turn, and check it; `damage` lists bad pages."""
        if not self.page_store.lazy or not ppns.size:
            return
        self.damage.pages.update(self.page_store.page_in(ppns).tolist())
        new = sorted_unique(ppns[self._unchecked[ppns] > 0])
        if new.size:
            self.damage.corrected += self._check_content(new[self.intact(new)]).size
            self._unchecked[new] = 0

    def read(self, ppns: U32) -> U8:
        """Return a copy of the content of pages, (N, page_bytes)."""
        self.page_in(ppns)
        pages: U8 = self.content[ppns]
        return pages

    def copy(self, folder: Folder | None = None) -> Nand:
        """Return an independent array with the same content and wear, in memory or in a new folder."""
        if folder is not None:
            NandFiles.make(folder, self.geometry)
        other, pages = Nand(self.geometry, self.faults, self.payload, folder), self.programmed()
        for name in ("erase_count", "bad", "next_page"):
            getattr(other, name)[:] = getattr(self, name)
        other.bad_blocks = self.bad_blocks
        for block in np.flatnonzero((self.erase_count > 0) | (self.bad > 0)).tolist():
            other._write_block(block)
        for some in np.array_split(pages, 1 + pages.size // 4096):
            if self.payload:
                content = self.read(some)
                other.content[some], other.spare[some] = content, self.spare[some]
                other._write(some, content)
                self.page_store.begin()
            else:
                other.tags[some] = self.tags[some]
        other.writes = self.writes
        other.sync()
        return other

    def _write(self, ppns: U32, pages: U8) -> None:
        """Write pages and their spare areas to the files, if there are any."""
        if self._files:
            with self._medium():
                self._files.write_pages(ppns, pages, self.spare[ppns])

    def _write_spares(self, ppns: U32) -> None:
        """Rewrite spare areas."""
        if self._files:
            with self._medium():
                self._files.write_spares(ppns, self.spare[ppns])

    def advance_generation(self) -> None:
        """Advance the file generation for a journal record, so that files from before and after it do not mix."""
        if self._files:
            self._write_generation(self._files.generation + 1)

    def _write_generation(self, generation: int) -> None:
        if self._files:
            with self._medium():
                self._files.write_generation(generation)

    def _write_block(self, block: int) -> None:
        if self._files:
            with self._medium():
                self._files.write_block(block, int(self.erase_count[block]), int(self.bad[block]))

    def _mark_bad(self, block: int) -> None:
        assert self.bad_blocks < self.geometry.blocks or self.bad[block]
        self.bad_blocks += not self.bad[block]
        self.bad[block] = 1
        self._write_block(block)

    @contextmanager
    def _medium(self) -> Iterator[None]:
        """Turn an OSError of the block into a permanent failure of the array; raises MediaFailedError."""
        self._check_writable()
        self._unsynced = True
        try:
            yield
        except OSError as error:
            what = f"{error.filename or 'the drive'}: {error.strerror or error}"
            self.failed = f"{what}; flushed data is safe: {suggest_fix(error)}, then open the drive again"
            raise MediaFailedError(self.failed) from error

    def _check_writable(self) -> None:
        """Raise MediaFailedError if the array has failed."""
        if self.failed:
            raise MediaFailedError(self.failed)

    @property
    def name(self) -> str:
        """Folder of the files, for messages."""
        return self._files.folder.name if self._files else "memory"

    def has_room(self, pages: int) -> bool:
        """Whether the file system has room for `pages` pages plus `MARGIN_BYTES`."""
        if not self._files:
            return True
        return self._files.folder.free_bytes() >= MARGIN_BYTES + pages * (self.geometry.page_bytes + SPARE.itemsize)

    def sync(self) -> None:
        """Make all programs and erases durable; raises MediaFailedError."""
        if self._files and self._unsynced:
            with self._medium():
                self._files.folder.sync()
            self._unsynced = False

    def block_of(self, ppns: U32) -> I64:
        """Block numbers (superblock * lanes + lane) of pages."""
        wide = ppns.astype(np.int64)
        lanes = self.geometry.lanes
        return wide // self.geometry.superblock_pages * lanes + wide % lanes

    def pages_of(self, block: int) -> U32:
        """Pages of a block in program order."""
        g = self.geometry
        superblock, lane = divmod(block, g.lanes)
        return (np.arange(g.pages_per_block, dtype=np.uint32) + superblock * g.pages_per_block) * g.lanes + lane

    def programmed(self) -> U32:
        """Pages programmed since their block's last erase."""
        ppns: U32 = np.empty(int(self.next_page.sum(dtype=np.int64)), np.uint32)
        list_programmed(self.next_page, self.geometry.lanes, self.geometry.pages_per_block, ppns)
        return ppns

    def program(self, ppns: U32, data: U8 | None, tags: U64, write_numbers: U64 | None = None) -> int:
        """Program pages in the given order.

        Args:
            ppns: Physical pages, (N,).
            data: Content, (N, page_bytes); None on a drive without payload.
            tags: Tags, (N,).
            write_numbers: Numbers of the original writes if pages are moved, (N,); None assigns new ones.

        Returns:
            Number of pages programmed. If a page fails, it and the later ones are not programmed; its block is bad.

        Raises:
            MediaFailedError: The files can no longer be written.
        """
        self._check_writable()
        g = self.geometry
        good = ppns.size
        if self.faults.program_fail:
            failed = self._generator.random(ppns.size) < self.faults.program_fail
            good = int(failed.argmax()) if failed.any() else good
        bad = claim_pages(ppns[: good + 1], self.next_page, g.lanes, g.pages_per_block)
        if bad >= 0:
            raise NandRuleError(f"page {ppns[bad]} programmed twice or out of order")
        assert not self.bad[self.block_of(ppns[: good + 1])].any(), "a page of a bad block is programmed"
        if good < ppns.size:
            self._mark_bad(int(self.block_of(ppns[good : good + 1])[0]))
            ppns, tags = ppns[:good], tags[:good]
            data = None if data is None else data[:good]
            write_numbers = None if write_numbers is None else write_numbers[:good]
        if self.payload:
            assert data is not None and data.shape[0] == tags.size == good
            if write_numbers is None:
                write_numbers = np.arange(self.writes + 1, self.writes + 1 + good, dtype=np.uint64)
            self.release_erased()
            spare = build_spares(data, tags, write_numbers, self.erase_count[self.block_of(ppns)])
            self.page_store.write(ppns, data)
            self.spare[ppns] = spare
            if self.page_store.lazy:
                self._unchecked[ppns] = 0
            self._write(ppns, data)
            if self.log:
                for i in range(good):
                    self.log(Program(int(ppns[i]), data[i].copy(), spare[i].copy()))
        else:
            self.tags[ppns] = tags
        self.writes += good
        return good

    def check_readable(self, ppns: U32) -> None:
        """Raise NandRuleError if a page was not programmed since its last erase."""
        g = self.geometry
        bad = first_unwritten(ppns, self.next_page, g.lanes, g.pages_per_block)
        if bad >= 0:
            raise NandRuleError(f"page {ppns[bad]} read before it was programmed")

    def intact(self, ppns: U32) -> NDArray[np.bool_]:
        """Whether the content of each page is known to match its spare area, (N,) bool."""
        return (self.write_numbers[ppns] > 0) & ~self.damage.contains(ppns)

    def bit_errors(self, ppns: U32) -> I64:
        """Draw the bit errors of the worst codeword of each page for this read, (N,) int64."""
        if not self.faults.raw_bit_errors:
            return np.zeros(ppns.size, np.int64)
        erases = self.erase_count[self.block_of(ppns)].astype(np.int64)
        return self.faults.worst_codewords(self._generator, erases, self.geometry.page_bytes)

    def erase(self, block: int) -> bool:
        """Erase a block after syncing earlier programs; returns False if the erase failed and the block is bad."""
        self._check_writable()
        self.sync()
        if self.log:
            self.log(Erase(block))
        assert 0 <= self.next_page[block] <= self.geometry.pages_per_block
        pages = self.pages_of(block)[: self.next_page[block]]
        self.tags[pages] = 0
        if self.payload:
            self.spare[pages] = 0
            self._erased.append(block)
            self.damage.pages.difference_update(pages.tolist())
            self.damage.spares.difference_update(pages.tolist())
        self.next_page[block] = 0
        self.erase_count[block] += 1
        if self.faults.erase_fail and self._generator.random() < self.faults.erase_fail:
            self._mark_bad(block)
        else:
            self._write_block(block)
        return not self.bad[block]

    def release_erased(self) -> None:
        """Release the memory and the disk space of erased blocks, adjacent blocks together."""
        if not self._erased:
            return
        self.sync()  # an erase that is not durable must not lose its pages
        g, blocks = self.geometry, np.array(sorted(self._erased))
        self._erased.clear()
        for run in runs(blocks):
            for superblock in np.unique(blocks[run] // g.lanes).tolist():
                lanes = blocks[run][blocks[run] // g.lanes == superblock] % g.lanes
                whole = lanes.size == g.lanes
                for page in range(1 if whole else g.pages_per_block):
                    first = (superblock * g.pages_per_block + page) * g.lanes + int(lanes[0])
                    self._discard(first, g.superblock_pages if whole else lanes.size)

    def _discard(self, first: int, count: int) -> None:
        self.page_store.discard(first, count)
        if self._files:
            with self._medium():
                self._files.discard(first, count)
