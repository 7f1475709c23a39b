"""Conventional mapping: a page-mapped block namespace that shares the flash with the KV groups."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from csd_spec.arrays import I64, U8, U32, U64
from csd_spec.view import UNMAPPED, in_flash
from ftl.discards import Discards
from ftl.errors import FtlError, UncorrectableReadError
from ftl.flash import tag
from ftl.flash.placement import Writer
from ftl.flash.plan import PagePlan
from ftl.flash.references import Reference, Referrer
from ftl.flash.store import FlashStore


class BlockNamespace(Referrer):
    """Logical pages of the drive's page size. Pages that were never written, or were discarded, read as zeros."""

    def __init__(self, store: FlashStore) -> None:
        self.store = store
        self.map: U32 = np.zeros(0, np.uint32)
        self.mapped = 0  # mapped pages; needed at every allocation, so it is not recounted each time
        self.lost: set[int] = set()  # logical pages whose content is unreadable
        self.discards = Discards()
        self.torn: set[int] = set()  # write numbers that were in flight at power loss
        self.writer = Writer(store.geometry.channels, growth=1)
        page = np.array([store.geometry.page_bytes])
        self._one_page = page, page, np.array([1])  # useful bytes, bytes moved, ends of a plan

    @property
    def pages(self) -> int:
        return self.map.size

    def discard(self, first: int, count: int) -> None:
        """Unmap logical pages, so that they read as zeros, and invalidate their flash pages.

        A power loss before the next flush may restore the old content of some or all of them.
        """
        if not 0 <= first <= first + count <= self.pages:
            raise FtlError(f"logical pages {first} to {first + count - 1}: the namespace has {self.pages}")
        old = self.map[first : first + count]
        mapped = old[in_flash(old)]
        self.store.placement.invalidate(mapped)
        self.map[first : first + count] = UNMAPPED
        self.mapped -= mapped.size
        assert 0 <= self.mapped <= self.pages
        self.lost = {lpn for lpn in self.lost if not first <= lpn < first + count}
        if count:
            self.discards.add(first, first + count, self.store.nand.writes, self._empty)

    def _empty(self, first: int, end: int) -> bool:
        return not in_flash(self.map[first:end]).any()

    def resize(self, pages: int) -> None:
        """Grow the namespace to `pages` pages. It starts with 0 pages and cannot shrink."""
        if pages < self.pages or pages >= tag.MAX_LOGICAL_PAGES:
            raise FtlError(f"namespace of {pages} pages: it has {self.pages} and can only grow, to less than 2^32")
        self.map = np.concatenate([self.map, np.full(pages - self.pages, UNMAPPED, np.uint32)])

    def write(self, lpns: I64, data: U8 | None, start_ns: int, writer: Writer | None = None) -> int:
        """Write logical pages.

        Args:
            lpns: Logical pages, (N,) int64, without duplicates.
            data: Content, (N, page_bytes) uint8; None on a drive without payload.
            start_ns: Simulated time of the command, ns.
            writer: Placement handle; writers do not share blocks. None: the namespace's own writer.

        Returns:
            Simulated time at which the last program ends, ns.
        """
        self._check(lpns)
        writer = writer or self.writer
        store, there = self.store, int(np.count_nonzero(in_flash(self.map[lpns])))
        turns = writer.written + np.arange(lpns.size)  # round robin: channels fill evenly for any LPN pattern
        (ppns,) = store.allocate([(writer, turns)], start_ns, overwrites=there == lpns.size)
        finish_ns = store.program(writer, ppns, data, tag.block_tags(lpns), start_ns)
        old = self.map[lpns]
        self.map[lpns] = ppns
        assert (self.map[lpns] == ppns).all(), "a logical page is written twice by a command"
        self.mapped += lpns.size - there
        assert self.mapped <= self.pages
        self.lost.difference_update(lpns.tolist())
        store.placement.invalidate(old[in_flash(old)])
        store.counters.blocks += ppns.size
        return finish_ns

    def read(self, lpns: I64, start_ns: int) -> tuple[U8, int]:
        """Return the content (N, page_bytes) of logical pages, and the simulated time at which it has arrived, ns."""
        self._check(lpns)
        self._check_lost(lpns.tolist())
        ppns = self.map[lpns]
        mapped = in_flash(ppns)
        finish_ns = self.store.read(self.store.all_of(ppns[mapped]), start_ns)
        data = np.zeros((lpns.size, self.store.geometry.page_bytes), np.uint8)
        data[mapped] = self.store.nand.read(ppns[mapped])
        return data, finish_ns

    def read_page(self, lpn: int, start_ns: int) -> tuple[bytes, int]:
        """Read one page: the same result as `read` at a fraction of the emulator's own time."""
        ppn = self.map[lpn : lpn + 1]
        if not in_flash(ppn)[0]:
            self._check_lost([lpn])
            return bytes(self.store.geometry.page_bytes), start_ns
        finish_ns = self.store.read(PagePlan(ppn, *self._one_page), start_ns)
        return self.store.nand.read(ppn)[0].tobytes(), finish_ns

    def restore(self, tags: U64, ppns: U32) -> None:
        """Map the newest page of every tag (power-on)."""
        lpns = tag.logical_pages(tags)
        inside = lpns < self.pages
        assert not in_flash(self.map[lpns[inside]]).any(), "a logical page is mapped before recovery"
        self.map[lpns[inside]] = ppns[inside]
        self.mapped = int(np.count_nonzero(inside))
        np.add.at(self.store.placement.valid, self.store.nand.block_of(ppns[inside]), 1)

    def _check_lost(self, lpns: list[int]) -> None:
        if self.lost and (gone := sorted(self.lost.intersection(lpns))):
            raise UncorrectableReadError([], f"logical page {gone[0]}")

    def _check(self, lpns: I64) -> None:
        if lpns.size and not 0 <= int(lpns.min()) <= int(lpns.max()) < self.pages:
            raise FtlError(f"logical pages {lpns.min()} to {lpns.max()}: the namespace has {self.pages}")

    def lose(self, tags: U64, for_good: bool) -> list[int]:
        """Record logical pages that are lost permanently; they stay unreadable until they are overwritten."""
        if for_good:
            self.lost.update(tag.logical_pages(tags[tag.kinds(tags) == tag.PageKind.BLOCK]).tolist())
        return []

    def overwrite_blocks(self) -> int:
        """Blocks that overwrites need: one extent, and room to collect the blocks with the fewest valid pages."""
        g = self.store.geometry
        return 4 * g.channels + self.mapped // (2 * g.channels * g.pages_per_block) if self.mapped else 0

    def references(self, tags: U64) -> Iterator[Reference]:
        """The map, for tags of logical pages."""
        which = np.flatnonzero(tag.kinds(tags) == tag.PageKind.BLOCK)
        if which.size:
            yield Reference(self.map, which, tag.logical_pages(tags[which]))
