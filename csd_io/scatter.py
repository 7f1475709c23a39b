"""Many ranges of a file read at once, each to where it belongs in memory: past the page cache where that can be."""

from __future__ import annotations

import ctypes
import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from csd_io.ring import READ, Ring
from csd_spec.arrays import I64

DEPTH = 128  # measured: a virtual disk serves half as many small reads with 32


class Scatter:
    """A file's ranges, `depth` of them in flight. how: what carries reads out. fallen: why that is not io_uring past
    the page cache; empty where it is. most: that were in flight at once, where io_uring counts them.

    Offsets, sizes and addresses are those that direct I/O wants. Used by one thread at a time.
    """

    def __init__(self, path: Path, depth: int = DEPTH, ring: bool = True, direct: bool = True) -> None:
        """ring, direct: whether io_uring is tried, and direct I/O. Raises OSError for what cannot be opened."""
        self.depth, self.most, why = depth, 0, list[str]()
        self._fd = self._open(path, direct, why)
        self._ring: Ring | None = None
        self._pool: ThreadPoolExecutor | None = None
        try:
            if not ring:
                raise OSError(errno.ENOSYS, "io_uring is not asked for")
            self._ring = Ring(depth)
        except OSError as error:
            why.append(f"no io_uring ({error.strerror}): threads read")
            self._pool = ThreadPoolExecutor(depth, "scatter")
        self.fallen = "; ".join(why)
        self.how = "io_uring" if self._ring else "threads"

    @staticmethod
    def _open(path: Path, direct: bool, why: list[str]) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            if not direct:
                raise OSError(errno.EINVAL, "not asked for")
            return os.open(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            why.append(f"no direct I/O on {path} ({error.strerror}): the page cache is in between")
            return os.open(path, flags)

    def read(self, offsets: I64, where: I64, sizes: I64) -> I64:
        """Read sizes (N,) bytes from offsets (N,) to addresses `where` (N,); returns of each how many bytes came, or
        -errno."""
        results = np.zeros(offsets.size, np.int64)
        if self._ring:
            try:
                self._by_ring(self._ring, (offsets, where, sizes), results)
            except BaseException:  # completions of this call may still come, and must not be taken for later ones
                self._ring.close()
                self._ring, self.how = None, "threads"
                self._pool = ThreadPoolExecutor(self.depth, "scatter")
                raise
        elif self._pool:
            columns = offsets.tolist(), where.tolist(), sizes.tolist()
            results[:] = list(self._pool.map(self._by_call, *columns))
        return results

    def _by_ring(self, ring: Ring, columns: tuple[I64, I64, I64], results: I64) -> None:
        begun = ended = 0
        while ended < results.size:
            batch = slice(begun, min(begun + self.depth - (begun - ended), results.size))
            offsets, where, sizes = (column[batch] for column in columns)
            ring.move_many(READ, self._fd, offsets, where, sizes, begun)
            begun = batch.stop
            self.most = max(self.most, begun - ended)
            ring.enter(min(begun - ended, self.depth // 2))
            for number, result in ring.completions():
                results[number] = result
                ended += 1

    def _by_call(self, offset: int, where: int, size: int) -> int:
        try:
            return os.preadv(self._fd, [(ctypes.c_char * size).from_address(where)], offset)
        except OSError as error:
            return -(error.errno or errno.EIO)

    def close(self) -> None:
        """Let go of the file."""
        if self._ring:
            self._ring.close()
        if self._pool:
            self._pool.shutdown()
        os.close(self._fd)


def bridged(numbers: I64, spare: int, longest: int) -> tuple[I64, I64]:
    """Runs of ascending numbers, as firsts and ends (behind the last). Gaps of up to `longest` numbers between them are
    bridged, the smallest first, as long as no more than `spare` others come with them."""
    gaps = np.diff(numbers) - 1
    order = np.argsort(gaps, kind="stable")
    kept = np.zeros(gaps.size, bool)
    kept[order] = (np.cumsum(gaps[order]) <= spare) & (gaps[order] <= longest)
    breaks = np.flatnonzero(~kept)
    firsts: I64 = numbers[np.concatenate([[0], breaks + 1])]
    ends: I64 = numbers[np.concatenate([breaks, [numbers.size - 1]])] + 1
    return firsts, ends
