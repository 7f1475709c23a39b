"""The NAND array: content, spare areas, and the rules of program and erase."""

from __future__ import annotations

import zlib

import numpy as np
from numba import njit
from numpy.typing import NDArray

from csd_spec import Geometry
from ftl.errors import NandRuleError
from ftl.memory import lazy_zeros

ERASED = 0xFF  # an erased cell reads as ones; as FP16 that is a NaN

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
def _first_unwritten(ppns, next_page, lanes, pages_per_block):  # type: ignore[no-untyped-def]
    for i in range(ppns.size):
        row, lane = divmod(ppns[i], lanes)
        superblock, page = divmod(row, pages_per_block)
        if page >= next_page[superblock * lanes + lane]:
            return i
    return -1


class Nand:
    """Pages that are programmed once and in order within their block, and erased by block.

    The spare area of a page holds a logical tag, the number of the write that filled it and a CRC-32 of its
    content.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.content: U8 = lazy_zeros((geometry.pages, geometry.page_bytes), np.uint8)
        self.tags: U64 = lazy_zeros((geometry.pages,), np.uint64)
        self.write_numbers: U64 = lazy_zeros((geometry.pages,), np.uint64)
        self.checksums: U32 = lazy_zeros((geometry.pages,), np.uint32)
        self.next_page: NDArray[np.int32] = lazy_zeros((geometry.blocks,), np.int32)
        self.erase_count: NDArray[np.int32] = lazy_zeros((geometry.blocks,), np.int32)
        self.writes = 0

    def program(self, ppns: U32, data: U8, tags: U64) -> None:
        """Write `data` (N, page_bytes) and `tags` (N,) to pages `ppns` (N,), in that order."""
        g = self.geometry
        bad = _claim_pages(ppns, self.next_page, g.lanes, g.pages_per_block)
        if bad >= 0:
            raise NandRuleError(f"page {ppns[bad]} programmed twice or out of order")
        self.content[ppns] = data
        self.tags[ppns] = tags
        self.write_numbers[ppns] = np.arange(self.writes, self.writes + ppns.size, dtype=np.uint64)
        self.checksums[ppns] = [zlib.crc32(page) for page in data]
        self.writes += ppns.size

    def check_readable(self, ppns: U32) -> None:
        """Raise NandRuleError where a page was not programmed since its last erase."""
        g = self.geometry
        bad = _first_unwritten(ppns, self.next_page, g.lanes, g.pages_per_block)
        if bad >= 0:
            raise NandRuleError(f"page {ppns[bad]} read before it was programmed")

    def intact(self, ppns: U32) -> bool:
        """True when the content of every page matches the checksum in its spare area."""
        return all(zlib.crc32(self.content[ppn]) == self.checksums[ppn] for ppn in ppns)

    def erase(self, superblock: int) -> None:
        """Erase the block `superblock` of every lane."""
        g = self.geometry
        blocks = slice(superblock * g.lanes, (superblock + 1) * g.lanes)
        first = superblock * g.superblock_pages
        rows = int(self.next_page[blocks].max()) * g.lanes  # nothing beyond was touched
        self.content[first : first + rows] = ERASED
        self.tags[first : first + rows] = 0
        self.next_page[blocks] = 0
        self.erase_count[blocks] += 1
