"""The NAND array: content, spare areas, and the rules of program and erase."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from csd_spec import Geometry
from csd_spec.arrays import I32, I64, U8, U32, U64
from ftl.errors import NandRuleError
from ftl.flash.faults import FaultPlan
from ftl.flash.memory import data_ranges, lazy_zeros

ERASED = 0xFF  # an erased cell reads as ones; as FP16 that is a NaN


@dataclass(frozen=True, slots=True)
class Program:
    """One page's program, as a `Nand.log` gets it."""

    ppn: int
    page: U8
    tag: int
    write_number: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Erase:
    """One block's erase."""

    block: int


Operation = Program | Erase


@njit(cache=True, nogil=True, error_model="numpy")
def _claim_pages(ppns, next_page, lanes, pages_per_block):  # type: ignore[no-untyped-def]
    """Advance each block's program pointer; returns the position of the first page out of order, or -1."""
    for i in range(ppns.size):
        row, lane = divmod(ppns[i], lanes)
        superblock, page = divmod(row, pages_per_block)
        block = superblock * lanes + lane
        if next_page[block] != page:
            return i
        next_page[block] = page + 1
    return -1


@njit(cache=True, nogil=True, error_model="numpy")
def _first_unwritten(ppns, next_page, lanes, pages_per_block):  # type: ignore[no-untyped-def]
    for i in range(ppns.size):
        row, lane = divmod(ppns[i], lanes)
        superblock, page = divmod(row, pages_per_block)
        if page >= next_page[superblock * lanes + lane]:
            return i
    return -1


class Nand:
    """Pages that are programmed once and in order within their block, and erased by block.

    The spare area of a page holds a logical tag, the number of the write that filled it (from 1; 0 is erased) and a
    CRC-32 of its content; a block's erase count survives in its spare areas too. Everything else is the
    controller's knowledge and lost with its power.

    payload=False keeps tags only: time and wear of drives whose content would not fit this machine.
    path: a folder whose files hold the array; one that exists is opened as it was left. private: the files are
    only read, changes stay in memory.
    """

    def __init__(
        self,
        geometry: Geometry,
        faults: FaultPlan | None = None,
        payload: bool = True,
        path: Path | None = None,
        private: bool = False,
    ) -> None:
        self.geometry, self.faults, self.payload = geometry, faults or FaultPlan(), payload
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)

        def array(name: str, shape: tuple[int, ...], dtype: type) -> Any:
            return lazy_zeros(shape, dtype, path / f"{name}.bin" if path else None, private)

        pages = geometry.pages
        self.content: U8 = array("content", (pages if payload else 1, geometry.page_bytes), np.uint8)
        self.tags: U64 = array("tags", (pages,), np.uint64)
        self.write_numbers: U64 = array("write_numbers", (pages if payload else 1,), np.uint64)
        self.checksums: U32 = array("checksums", (pages if payload else 1,), np.uint32)
        self.erase_count: I32 = array("erase_count", (geometry.blocks,), np.int32)
        self.bad: U8 = array("bad_blocks", (geometry.blocks,), np.uint8)
        self.log: Callable[[Operation], None] | None = None  # told of everything that changes the array
        self._generator = np.random.default_rng(self.faults.seed)
        if self.faults.factory_bad and not self.bad.any():
            self.bad[self._generator.random(geometry.blocks) < self.faults.factory_bad] = 1
        self.next_page: I32 = lazy_zeros((geometry.blocks,), np.int32)
        self.writes = 0
        if path is not None and (path / "content.bin").exists():
            self.power_on(self._written_superblocks(path))

    def _written_superblocks(self, path: Path) -> list[int]:
        """Those that some page was ever written to: of a large drive's file most is a hole."""
        size = self.geometry.superblock_pages * self.geometry.page_bytes
        found = {sb for first, end in data_ranges(path / "content.bin") for sb in range(first // size, -(-end // size))}
        return sorted(found)

    def power_on(self, superblocks: Iterable[int] | None = None) -> None:
        """Learn from the spare areas, of these superblocks or of all, what a controller knows: what is programmed."""
        g = self.geometry
        self.writes = 0
        for superblock in range(g.blocks_per_plane) if superblocks is None else superblocks:
            rows = slice(superblock * g.superblock_pages, (superblock + 1) * g.superblock_pages)
            numbers = self.write_numbers[rows].reshape(g.pages_per_block, g.lanes)
            content = self.content[rows].reshape(g.pages_per_block, g.lanes, -1)
            written = numbers > 0
            used = np.where(written.any(0), g.pages_per_block - written[::-1].argmax(0), 0)
            # A program that was cut short may have left data but no spare area: that page is used up too
            open_ = np.flatnonzero(used < g.pages_per_block)
            after = content[used[open_], open_]
            used[open_] += ((after != 0) & (after != ERASED)).any(axis=1)
            self.next_page[superblock * g.lanes : (superblock + 1) * g.lanes] = used
            self.writes = max(self.writes, int(numbers.max()))

    def copy(self, path: Path | None = None) -> Nand:
        """An array of its own with the same content and wear, in memory or in a new folder."""
        if path is not None and path.exists() and any(path.iterdir()):
            raise FileExistsError(f"{path} is not empty")
        other, pages = Nand(self.geometry, self.faults, self.payload, path), self.programmed()
        for name in ("content", "tags", "write_numbers", "checksums") if self.payload else ("tags",):
            for some in np.array_split(pages, 1 + pages.size // 4096):
                getattr(other, name)[some] = getattr(self, name)[some]
        for name in ("erase_count", "bad", "next_page"):
            getattr(other, name)[:] = getattr(self, name)
        other.writes = self.writes
        return other

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
        """Every page that was programmed since its last erase."""
        blocks = np.flatnonzero(self.next_page)
        parts = [self.pages_of(block)[: self.next_page[block]] for block in blocks.tolist()]
        return np.concatenate([np.zeros(0, np.uint32), *parts])

    def program(self, ppns: U32, data: U8 | None, tags: U64, write_numbers: U64 | None = None) -> int:
        """Write `data` (N, page_bytes) and `tags` (N,) to pages `ppns` (N,), in that order.

        Returns how many were programmed: a page that fails, and those after it, are not, and its block is bad.
        write_numbers: those of the original writes when pages are moved.
        """
        g = self.geometry
        good = ppns.size
        if self.faults.program_fail:
            failed = self._generator.random(ppns.size) < self.faults.program_fail
            good = int(failed.argmax()) if failed.any() else good
        bad = _claim_pages(ppns[: good + 1], self.next_page, g.lanes, g.pages_per_block)
        if bad >= 0:
            raise NandRuleError(f"page {ppns[bad]} programmed twice or out of order")
        if good < ppns.size:
            self.bad[self.block_of(ppns[good : good + 1])] = 1
            ppns, tags = ppns[:good], tags[:good]
            data = None if data is None else data[:good]
            write_numbers = None if write_numbers is None else write_numbers[:good]
        self.tags[ppns] = tags
        if self.payload:
            assert data is not None
            if write_numbers is None:
                write_numbers = np.arange(self.writes + 1, self.writes + 1 + good, dtype=np.uint64)
            sums = np.array([zlib.crc32(page) for page in data], np.uint32)
            self.content[ppns], self.write_numbers[ppns], self.checksums[ppns] = data, write_numbers, sums
            if self.log:
                for i in range(good):
                    spare = int(tags[i]), int(write_numbers[i]), int(sums[i])
                    self.log(Program(int(ppns[i]), data[i].copy(), *spare))
        self.writes += good
        return good

    def check_readable(self, ppns: U32) -> None:
        """Raise NandRuleError where a page was not programmed since its last erase."""
        g = self.geometry
        bad = _first_unwritten(ppns, self.next_page, g.lanes, g.pages_per_block)
        if bad >= 0:
            raise NandRuleError(f"page {ppns[bad]} read before it was programmed")

    def intact(self, ppns: U32) -> NDArray[np.bool_]:
        """Where the content of a page matches the checksum in its spare area, (N,)."""
        sums = np.array([zlib.crc32(self.content[ppn]) for ppn in ppns], np.uint32)
        good: NDArray[np.bool_] = (sums == self.checksums[ppns]) & (self.write_numbers[ppns] > 0)
        return good

    def bit_errors(self, ppns: U32) -> I64:
        """Bit errors in the worst codeword of each page, as this read finds them."""
        if not self.faults.raw_bit_errors:
            return np.zeros(ppns.size, np.int64)
        erases = self.erase_count[self.block_of(ppns)].astype(np.int64)
        return self.faults.worst_codewords(self._generator, erases, self.geometry.page_bytes)

    def erase(self, block: int) -> bool:
        """Erase a block; False when that failed and the block is bad from now on."""
        if self.log:
            self.log(Erase(block))
        pages = self.pages_of(block)[: self.next_page[block]]
        if self.payload:
            self.content[pages] = ERASED
            self.write_numbers[pages] = 0
        self.tags[pages] = 0
        self.next_page[block] = 0
        self.erase_count[block] += 1
        if self.faults.erase_fail and self._generator.random() < self.faults.erase_fail:
            self.bad[block] = 1
        return not self.bad[block]
