"""Page content while a drive is powered: in memory, or in a file read with O_DIRECT.

In both, a page has the same position in one array, so kernels need no special cases. With a file, only pages that were
paged in may be accessed. A *turn* is the set of reads of one command: its pages stay resident until the next turn
begins.
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
from csd_io.scatter import Scatter, coalesce_ranges
from csd_spec import Geometry
from csd_spec.arrays import I64, U8, U32
from ftl.flash.cache import FlashPageCache
from ftl.flash.files import CONTENT, runs
from ftl.flash.memory import as_array, release, reserve_memory, reserve_zeros

MAX_OVERREAD_FRACTION = 1 / 12  # unwanted bytes read to coalesce requests / bytes of the plan
GAP_BYTES = 16 << 10  # largest gap that is coalesced: reading it takes as long as a separate request


@dataclass(slots=True)
class ReadCounts:
    """Reads of a backing store.

    Attributes:
        wanted: Bytes of pages that were paged in.
        hits: Bytes of `wanted` that were already resident.
        asked: Bytes requested from the device or the kernel.
        wasted: Bytes of `asked` that were not wanted.
        requests: Number of requests.
        depth: Largest number of requests in flight, if known.
    """

    wanted: int = 0
    hits: int = 0
    asked: int = 0
    wasted: int = 0
    requests: int = 0
    depth: int = 0


class PageStore(Protocol):
    """Backing store of a NAND array's content.

    Attributes:
        pages: Content of all pages, (pages, page_bytes) uint8.
        lazy: Whether pages must be paged in before they are accessed.
        io_error: Error message of the device after a failed read; empty if none failed.
    """

    pages: U8
    lazy: bool
    counts: ReadCounts
    io_error: str

    def begin(self) -> None:
        """Begin a turn: pages of the previous turn may be evicted."""
        ...

    def page_in(self, ppns: U32) -> U32:
        """Make pages resident in `pages` until the turn ends; returns those that the device could not read."""
        ...

    def write(self, ppns: U32, data: U8) -> None:
        """Update the resident content of pages; the caller writes the files."""
        ...

    def discard(self, first: int, count: int) -> None:
        """Drop the content of pages."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


NONE: U32 = np.zeros(0, np.uint32)


class MemoryPageStore:
    """All pages in memory; `stored` is their number."""

    lazy, io_error = False, ""

    def __init__(self, geometry: Geometry, stored: int) -> None:
        self._size, self.counts = geometry.page_bytes, ReadCounts()
        self._memory = reserve_memory(stored * self._size)
        self.pages: U8 = as_array(self._memory, (stored, self._size), np.uint8)

    def begin(self) -> None:
        """No-op: nothing is evicted."""

    def page_in(self, ppns: U32) -> U32:
        return NONE

    def write(self, ppns: U32, data: U8) -> None:
        self.pages[ppns] = data

    def discard(self, first: int, count: int) -> None:
        release(self._memory, first * self._size, count * self._size)

    def close(self) -> None:
        """Return the memory to the system now; views of it are zero from then on."""
        self._memory.madvise(mmap.MADV_DONTNEED)


class DirectPageStore:
    """A file read with O_DIRECT into frames of whole blocks, each at the position of its pages in one array.

    After a turn, the most frequently read frames stay resident: attention reads cyclically, so LRU would be useless.
    """

    lazy = True

    def __init__(self, geometry: Geometry, path: Path, cache_bytes: int) -> None:
        """Raises ValueError if page size and block size are not multiples of each other."""
        size, self.counts, self.io_error = geometry.page_bytes, ReadCounts(), ""
        if max(size, BLOCK) % min(size, BLOCK) or geometry.capacity_bytes % BLOCK:
            raise ValueError(f"medium = direct: pages of {size} bytes do not fill blocks of {BLOCK}: take memory")
        self._frame = max(size, BLOCK)
        self._per, frames = self._frame // size, geometry.capacity_bytes // self._frame
        self._memory = reserve_memory(geometry.capacity_bytes, huge_pages=False)
        self.pages: U8 = as_array(self._memory, (geometry.pages, size), np.uint8)
        self._at = int(self.pages.ctypes.data)
        self._here: U8 = reserve_zeros((frames,), np.uint8)
        self._cache, self._turn = FlashPageCache(cache_bytes // self._frame, frames), list[U32]()
        self._path, self._file = path, Scatter(path)
        if self._file.fallback_reason:
            warnings.warn(f"{path}: {self._file.fallback_reason}", stacklevel=2)

    def begin(self) -> None:
        if not self._turn:
            return
        left = sorted_unique(np.concatenate(self._turn))
        self._turn.clear()
        self._drop(left[~self._cache.holds(left)])

    def page_in(self, ppns: U32) -> U32:
        if not ppns.size:
            return NONE
        frames = sorted_unique(ppns // np.uint32(self._per))
        missing = frames[self._here[frames] == 0]
        self.counts.wanted += frames.size * self._frame
        self.counts.hits += (frames.size - missing.size) * self._frame
        if self._cache.capacity:
            before = self._cache.resident.copy()
            self._cache.touch(frames)
            self._turn.append(before[before != self._cache.resident[: before.size]])
        if not missing.size:
            return NONE
        failed = self._read(missing.astype(np.int64), int((1 + MAX_OVERREAD_FRACTION) * frames.size) - missing.size)
        return ppns[np.isin(ppns // np.uint32(self._per), failed)] if failed.size else NONE

    def _read(self, frames: I64, spare: int) -> I64:
        """Read frames, and at most `spare` frames between them; returns those that could not be read."""
        firsts, ends = coalesce_ranges(frames, spare, GAP_BYTES // self._frame)
        most = max(1, (1 << 18) // self._frame)  # frames per request: 256 KiB, so that many are in flight
        if (ends - firsts).max() > most:
            cuts = [np.append(np.arange(f, e, most), e) for f, e in zip(firsts.tolist(), ends.tolist(), strict=True)]
            firsts, ends = (np.concatenate([cut[part] for cut in cuts]) for part in (slice(-1), slice(1, None)))
        offsets, sizes = firsts * self._frame, (ends - firsts) * self._frame
        results = self._file.read(offsets, self._at + offsets, sizes)
        self.counts.depth = self._file.max_in_flight
        _count(self.counts, frames, firsts, ends, self._frame)
        lost = results != sizes
        if lost.any():
            code = -int(results[lost].min())
            self.io_error = f"{self._path}: {os.strerror(code if code > 0 else errno.EIO)}"
        come = [np.arange(first, end) for first, end in zip(firsts[~lost].tolist(), ends[~lost].tolist(), strict=True)]
        brought = np.concatenate([np.zeros(0, np.int64), *come]).astype(np.uint32)
        self._here[brought] = 1
        self._turn.append(brought)
        if self._cache.resident.size < self._cache.capacity:  # keep coalesced gaps while the cache has room
            self._cache.touch(np.setdiff1d(brought, frames.astype(np.uint32), assume_unique=True))
        failed: I64 = frames[self._here[frames] == 0]
        return failed

    def write(self, ppns: U32, data: U8) -> None:
        there = self._here[ppns // np.uint32(self._per)] > 0
        self.pages[ppns[there]] = data[there]

    def discard(self, first: int, count: int) -> None:
        frames = np.arange(first // self._per, (first + count - 1) // self._per + 1, dtype=np.uint32)
        here = frames[self._here[frames] > 0]
        self._cache.forget(here)
        self._drop(here)

    def _drop(self, frames: U32) -> None:
        self._here[frames] = 0  # before madvise: released memory reads as zeros
        for run in runs(frames.astype(np.int64)):
            self._memory.madvise(mmap.MADV_DONTNEED, int(frames[run][0]) * self._frame, frames[run].size * self._frame)

    def close(self) -> None:
        self._file.close()


def sorted_unique(numbers: U32) -> U32:
    """Return sorted unique numbers. `np.unique` hashes and takes several times as long."""
    ordered = np.sort(numbers)
    new: U32 = ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])[: ordered.size]]
    return new


def _count(counts: ReadCounts, numbers: I64, firsts: I64, ends: I64, size: int) -> None:
    """Add the requests [firsts, ends) for `numbers` to the counters."""
    pages = int((ends - firsts).sum())
    counts.asked += pages * size
    counts.wasted += (pages - numbers.size) * size
    counts.requests += firsts.size


def open_page_store(medium: Medium, geometry: Geometry, stored: int, folder: Path | None) -> PageStore:
    """Open the backing store of an array.

    Args:
        stored: Pages held in memory (1 on a drive without payload).
        folder: Folder of the drive's files; None for a drive in memory.

    Raises:
        ValueError: The medium needs a writable folder.
    """
    if medium.kind == "memory":
        return MemoryPageStore(geometry, stored)
    if folder is None or not folder.is_dir() or stored < geometry.pages:
        raise ValueError(f"medium = {medium.kind}: needs a folder that may be written to")
    return DirectPageStore(geometry, folder / CONTENT, medium.cache_bytes)
