"""The conventional mapping: a page-mapped block namespace beside the KV groups, on the same flash."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from csd_spec.view import UNMAPPED
from ftl.errors import FtlError
from ftl.groups import DRAM_BANK, KIND_SHIFT, Kind
from ftl.pages import PagePlan
from ftl.placement import Writer

if TYPE_CHECKING:
    from ftl.kv import Ftl

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]


class BlockNamespace:
    """Logical pages of the drive's page size. What was never written reads as zeros."""

    def __init__(self, ftl: Ftl) -> None:
        self.ftl = ftl
        self.map: U32 = np.zeros(0, np.uint32)
        self.writer = Writer(ftl.spec.geometry.channels, growth=1)
        page = np.array([ftl.spec.geometry.page_bytes])
        self._one_page = page, page, np.array([1])  # useful bytes, bytes moved, ends of a plan

    @property
    def pages(self) -> int:
        return self.map.size

    @property
    def mapped(self) -> int:
        """Pages that hold something."""
        return int(np.count_nonzero(self.map < DRAM_BANK))

    def discard(self) -> None:
        """Forget everything; what was written may come back after a loss of power before blocks are erased."""
        self.ftl.placement.invalidate(self.map[self.map < DRAM_BANK])
        self.map[:] = UNMAPPED

    def resize(self, pages: int) -> None:
        """Set the namespace's size; it only grows, and starts at nothing."""
        if pages < self.pages or pages >= 1 << 32:
            raise FtlError(f"namespace of {pages} pages: it has {self.pages} and can only grow, to less than 2^32")
        self.map = np.concatenate([self.map, np.full(pages - self.pages, UNMAPPED, np.uint32)])

    def write(self, lpns: I64, data: U8, start_ns: int) -> int:
        """Write logical pages (N,), each once, with data (N, page_bytes); returns when the last program ends."""
        self._check(lpns)
        ftl = self.ftl
        (ppns,) = ftl.allocate([(self.writer, lpns)], ftl.reserve, start_ns)
        tags = np.uint64(int(Kind.BLOCK) << KIND_SHIFT) | lpns.astype(np.uint64)
        finish_ns = ftl.program(self.writer, ppns, data, tags, start_ns)
        old = self.map[lpns]
        self.map[lpns] = ppns
        ftl.placement.invalidate(old[old < DRAM_BANK])
        ftl.counters.blocks += ppns.size
        return finish_ns

    def read(self, lpns: I64, start_ns: int) -> tuple[U8, int]:
        """Content (N, page_bytes) of logical pages, and when it has arrived."""
        self._check(lpns)
        ppns = self.map[lpns]
        mapped = ppns < DRAM_BANK
        finish_ns = self.ftl.read(self.ftl.whole(ppns[mapped]), start_ns)
        data = np.zeros((lpns.size, self.ftl.spec.geometry.page_bytes), np.uint8)
        data[mapped] = self.ftl.nand.content[ppns[mapped]]
        return data, finish_ns

    def read_page(self, lpn: int, start_ns: int) -> tuple[bytes, int]:
        """One page, as `read` gives it, in a fraction of the emulator's time."""
        ppn = self.map[lpn : lpn + 1]
        if ppn[0] >= DRAM_BANK:
            return bytes(self.ftl.spec.geometry.page_bytes), start_ns
        finish_ns = self.ftl.read(PagePlan(ppn, *self._one_page), start_ns)
        return self.ftl.nand.content[ppn[0]].tobytes(), finish_ns

    def restore(self, newest: tuple[U64, U32]) -> None:
        """Map the newest page of every tag."""
        tags, ppns = newest
        lpns = (tags & np.uint64(0xFFFFFFFF)).astype(np.int64)
        known = lpns < self.pages
        self.map[lpns[known]] = ppns[known]
        np.add.at(self.ftl.placement.valid, self.ftl.nand.block_of(ppns[known]), 1)

    def _check(self, lpns: I64) -> None:
        if lpns.size and not 0 <= int(lpns.min()) <= int(lpns.max()) < self.pages:
            raise FtlError(f"logical pages {lpns.min()} to {lpns.max()}: the namespace has {self.pages}")
