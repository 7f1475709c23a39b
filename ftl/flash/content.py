"""Where the bytes of pages are while a drive has power: in memory, in a mapped file, or in a file that is read past the
page cache.

In all of them a page has the same place in one array, so kernels know no difference; but where pages lie in a file,
only those that were brought may be looked at. A *turn* is what one command reads: that stays together until the next.
"""

from __future__ import annotations

import errno
import mmap
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from csd_io.medium import BLOCK, Medium
from csd_io.scatter import Scatter, bridged
from csd_spec import Geometry
from csd_spec.arrays import I64, U8, U32
from ftl.flash.cache import PageCache
from ftl.flash.files import CONTENT, runs
from ftl.flash.memory import as_array, lazy_memory, lazy_zeros, release

WASTE = 1 / 12  # of a plan's bytes, the most that is read beyond them to join requests
_POPULATE_READ = 22  # Linux: madvise(2), from 5.14; Python has no name for it
GAP_BYTES = 16 << 10  # between what is joined: a request of its own takes as long


@dataclass(slots=True)
class Counts:
    """What a medium was asked for. wanted: bytes of pages that were brought; hits: those of them that were there
    already (of a mapped file nobody knows); asked: bytes asked of the device or the kernel; wasted: those of them that
    nobody wanted. requests: how many that were; depth: the most in flight at once, as far as that is known."""

    wanted: int = 0
    hits: int = 0
    asked: int = 0
    wasted: int = 0
    requests: int = 0
    depth: int = 0


class Content(Protocol):
    """pages: (pages, page_bytes). lazy: whether a page has to be brought before it is looked at. trouble: what the
    device said when it could not read a page; empty as long as it could."""

    pages: U8
    lazy: bool
    counts: Counts
    trouble: str

    def begin(self) -> None:
        """A turn begins: nothing of the last one is needed any more."""
        ...

    def bring(self, ppns: U32) -> U32:
        """Have pages stand in `pages` until the turn ends; returns those that the device could not read."""
        ...

    def put(self, ppns: U32, data: U8) -> None:
        """Pages get other content; in files it is written by whoever has the files."""
        ...

    def discard(self, first: int, count: int) -> None:
        """Pages hold nothing any more."""
        ...

    def close(self) -> None:
        """Let go of the file."""
        ...


NONE: U32 = np.zeros(0, np.uint32)


class InMemory:
    """All pages are there. stored: how many."""

    lazy, trouble = False, ""

    def __init__(self, geometry: Geometry, stored: int) -> None:
        self._size, self.counts = geometry.page_bytes, Counts()
        self._memory = lazy_memory(stored * self._size)
        self.pages: U8 = as_array(self._memory, (stored, self._size), np.uint8)

    def begin(self) -> None:
        """Nothing leaves."""

    def bring(self, ppns: U32) -> U32:
        return NONE

    def put(self, ppns: U32, data: U8) -> None:
        self.pages[ppns] = data

    def discard(self, first: int, count: int) -> None:
        release(self._memory, first * self._size, count * self._size)

    def close(self) -> None:
        """There is no file."""


class Mapped:
    """A file in the kernel's page cache, of which only what a plan names is asked for. What a device cannot read would
    be a signal to whoever looks at it, so pages are mapped before that, where a failure is an error."""

    lazy = True

    def __init__(self, geometry: Geometry, path: Path) -> None:
        self._path, self._size, self.counts, self.trouble = path, geometry.page_bytes, Counts(), ""
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._memory = mmap.mmap(self._fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        self._memory.madvise(mmap.MADV_RANDOM)  # nothing but what is asked for
        self.pages: U8 = as_array(self._memory, (geometry.pages, self._size), np.uint8)

    def begin(self) -> None:
        """The kernel decides what leaves."""

    def bring(self, ppns: U32) -> U32:
        if not ppns.size:
            return NONE
        wanted = distinct(ppns).astype(np.int64)
        firsts, ends = bridged(wanted, int(WASTE * wanted.size), GAP_BYTES // self._size)
        requests = list(zip(firsts.tolist(), ends.tolist(), strict=True))
        for first, end in requests:
            os.posix_fadvise(self._fd, first * self._size, (end - first) * self._size, os.POSIX_FADV_WILLNEED)
        _count(self.counts, wanted, firsts, ends, self._size)
        failed = [page for first, end in requests if not self._map(first, end) for page in range(first, end)]
        lost = [page for page in failed if not self._map(page, page + 1)]
        return ppns[np.isin(ppns, lost)] if lost else NONE

    def _map(self, first: int, end: int) -> bool:
        """Have pages mapped; False where the device cannot read some."""
        begin = first * self._size // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            self._memory.madvise(_POPULATE_READ, begin, end * self._size - begin)
        except OSError as error:
            if error.errno == errno.EINVAL:  # a kernel before 5.14
                return True
            self.trouble = f"{self._path}: {os.strerror(errno.EIO)}"
            return False
        return True

    def put(self, ppns: U32, data: U8) -> None:
        """The file is written by calls, and the map shows it."""

    def discard(self, first: int, count: int) -> None:
        """So it is with a hole."""

    def close(self) -> None:
        os.close(self._fd)


class Direct:
    """A file that is read past the page cache into frames of memory, of whole blocks, each at its pages' own place.

    After a turn those stay that are asked for most often: attention goes round, and what was read last is needed last.
    """

    lazy = True

    def __init__(self, geometry: Geometry, path: Path, cache_bytes: int) -> None:
        """Raises ValueError for pages that do not fill blocks, or the other way round."""
        size, self.counts, self.trouble = geometry.page_bytes, Counts(), ""
        if max(size, BLOCK) % min(size, BLOCK) or geometry.capacity_bytes % BLOCK:
            raise ValueError(f"medium = direct: pages of {size} bytes do not fill blocks of {BLOCK}: take mapped")
        self._frame = max(size, BLOCK)
        self._per, frames = self._frame // size, geometry.capacity_bytes // self._frame
        self._memory = lazy_memory(geometry.capacity_bytes, huge=False)
        self.pages: U8 = as_array(self._memory, (geometry.pages, size), np.uint8)
        self._at = int(self.pages.ctypes.data)
        self._here: U8 = lazy_zeros((frames,), np.uint8)
        self._cache, self._turn = PageCache(cache_bytes // self._frame, frames), list[U32]()
        self._path, self._file = path, Scatter(path)
        if self._file.fallen:
            warnings.warn(f"{path}: {self._file.fallen}", stacklevel=2)

    def begin(self) -> None:
        if not self._turn:
            return
        left = distinct(np.concatenate(self._turn))
        self._turn.clear()
        self._drop(left[~self._cache.holds(left)])

    def bring(self, ppns: U32) -> U32:
        if not ppns.size:
            return NONE
        frames = distinct(ppns // np.uint32(self._per))
        missing = frames[self._here[frames] == 0]
        self.counts.wanted += frames.size * self._frame
        self.counts.hits += (frames.size - missing.size) * self._frame
        if self._cache.capacity:
            before = self._cache.kept.copy()
            self._cache.touch(frames)
            self._turn.append(before[before != self._cache.kept[: before.size]])
        if not missing.size:
            return NONE
        failed = self._read(missing.astype(np.int64), int((1 + WASTE) * frames.size) - missing.size)
        return ppns[np.isin(ppns // np.uint32(self._per), failed)] if failed.size else NONE

    def _read(self, frames: I64, spare: int) -> I64:
        """Read frames and at most `spare` between them; returns those that could not be read."""
        firsts, ends = bridged(frames, spare, GAP_BYTES // self._frame)
        most = max(1, (1 << 18) // self._frame)  # frames of a request: many of them fly at once
        if (ends - firsts).max() > most:
            cuts = [np.append(np.arange(f, e, most), e) for f, e in zip(firsts.tolist(), ends.tolist(), strict=True)]
            firsts, ends = (np.concatenate([cut[part] for cut in cuts]) for part in (slice(-1), slice(1, None)))
        offsets, sizes = firsts * self._frame, (ends - firsts) * self._frame
        results = self._file.read(offsets, self._at + offsets, sizes)
        self.counts.depth = self._file.most
        _count(self.counts, frames, firsts, ends, self._frame, wanted=False)
        lost = results != sizes
        if lost.any():
            code = -int(results[lost].min())
            self.trouble = f"{self._path}: {os.strerror(code if code > 0 else errno.EIO)}"
        come = [np.arange(first, end) for first, end in zip(firsts[~lost].tolist(), ends[~lost].tolist(), strict=True)]
        brought = np.concatenate([np.zeros(0, np.int64), *come]).astype(np.uint32)
        self._here[brought] = 1
        self._turn.append(brought)
        if self._cache.kept.size < self._cache.capacity:  # what came along is kept while there is room
            self._cache.touch(np.setdiff1d(brought, frames.astype(np.uint32), assume_unique=True))
        failed: I64 = frames[self._here[frames] == 0]
        return failed

    def put(self, ppns: U32, data: U8) -> None:
        there = self._here[ppns // np.uint32(self._per)] > 0
        self.pages[ppns[there]] = data[there]

    def discard(self, first: int, count: int) -> None:
        frames = np.arange(first // self._per, (first + count - 1) // self._per + 1, dtype=np.uint32)
        here = frames[self._here[frames] > 0]
        self._cache.forget(here)
        self._drop(here)

    def _drop(self, frames: U32) -> None:
        self._here[frames] = 0  # first: memory that was given back reads as zeros
        for run in runs(frames.astype(np.int64)):
            self._memory.madvise(mmap.MADV_DONTNEED, int(frames[run][0]) * self._frame, frames[run].size * self._frame)

    def close(self) -> None:
        self._file.close()


def distinct(numbers: U32) -> U32:
    """Each number once, ascending: `np.unique`, which hashes, takes several times as long."""
    ordered = np.sort(numbers)
    new: U32 = ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])[: ordered.size]]
    return new


def _count(counts: Counts, numbers: I64, firsts: I64, ends: I64, size: int, wanted: bool = True) -> None:
    """Requests for `numbers`, from firsts to ends."""
    asked = int((ends - firsts).sum())
    counts.asked += asked * size
    counts.wasted += (asked - numbers.size) * size
    counts.requests += firsts.size
    counts.wanted += numbers.size * size * wanted


def content_of(medium: Medium, geometry: Geometry, stored: int, folder: Path | None) -> Content:
    """An array's content; stored: pages in memory. Raises ValueError where pages should lie in a file of no folder."""
    if medium.kind == "memory":
        return InMemory(geometry, stored)
    if folder is None or not folder.is_dir() or stored < geometry.pages:
        raise ValueError(f"medium = {medium.kind}: needs a folder that may be written to")
    if medium.kind == "mapped":
        return Mapped(geometry, folder / CONTENT)
    return Direct(geometry, folder / CONTENT, medium.cache_bytes)
