"""Blocks with several requests in flight: the asynchronous half of what this package offers.

A `Queue` is used by one thread at a time. Every failure is an OSError that names the file; a request that cannot be
right (unaligned, too long, beyond the end) is a ValueError before anything is begun.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

Op = Literal["read", "write"]


@dataclass(frozen=True, slots=True)
class Request:
    """Fill `buffer` from byte `offset` on, or write it there. The buffer belongs to the queue until that has ended."""

    op: Op
    offset: int
    buffer: memoryview


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has ended; error: None where all its bytes were moved."""

    request: Request
    error: OSError | None


class Queue(Protocol):
    """Blocks of a file or a device.

    size_bytes: of all blocks. block_bytes: to which offsets, sizes and addresses of buffers are aligned. max_bytes: of
    one request. depth: requests in flight at most.
    """

    name: str
    size_bytes: int
    block_bytes: int
    max_bytes: int
    depth: int

    @property
    def how(self) -> str:
        """What carries requests out, for people."""
        ...

    def register(self, buffers: Sequence[memoryview]) -> None:
        """Name buffers that will be used again and again; a queue that gains nothing by that does nothing."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Begin requests; raises ValueError where more than `depth` would be in flight."""
        ...

    def reap(self, at_least: int) -> list[Ended]:
        """Requests that have ended, in any order, as soon as so many have; at most those that are in flight."""
        ...

    def discard(self, offset: int, size: int) -> None:
        """Say that nothing is needed of these bytes any more; they read as anything then. EOPNOTSUPP where nobody can
        be told."""
        ...

    def sync(self) -> None:
        """Return when what was written is durable."""
        ...

    def close(self) -> None:
        """Wait for what is in flight, and let go."""
        ...


def carry_out(queue: Queue, requests: Iterable[Request], depth: int | None = None) -> None:
    """Carry out requests, as many as may be in flight at once; raises OSError for the first that failed.

    depth: fewer in flight than the queue allows. However it ends, no request is in flight afterwards.
    """
    waiting, flying, failed = iter(requests), 0, None
    depth = min(depth or queue.depth, queue.depth)
    try:
        while failed is None:
            batch = [request for _, request in zip(range(depth - flying), waiting, strict=False)]
            queue.submit(batch)
            flying += len(batch)
            if not flying:
                return
            for ended in queue.reap(1):
                flying -= 1
                failed = failed or ended.error
        raise failed
    finally:
        if flying:
            queue.reap(flying)


def check(queue: Queue, requests: Sequence[Request], flying: int) -> None:
    """Raise ValueError for requests that cannot be carried out beside `flying` others."""
    if flying + len(requests) > queue.depth:
        raise ValueError(f"{queue.name}: {flying + len(requests)} requests in flight, at most {queue.depth}")
    for each in requests:
        size = each.buffer.nbytes
        if (each.offset | size | address(each.buffer)) % queue.block_bytes:
            raise ValueError(f"{queue.name}: {size} bytes at {each.offset}: not aligned to {queue.block_bytes}")
        if not 0 < size <= queue.max_bytes or not 0 <= each.offset <= queue.size_bytes - size:
            limits = f"at most {queue.max_bytes} of {queue.size_bytes}"
            raise ValueError(f"{queue.name}: {size} bytes at {each.offset}: {limits}")


def outcome(name: str, request: Request, result: int) -> Ended:
    """A request that has moved `result` bytes, or failed with -errno; fewer bytes than all are a failure."""
    if result == request.buffer.nbytes:
        return Ended(request, None)
    if result < 0:
        return Ended(request, OSError(-result, os.strerror(-result), name))
    short = f"{request.op} of {request.buffer.nbytes} bytes at {request.offset} ended after {result}"
    return Ended(request, OSError(errno.EIO, short, name))


def usable(name: str, there: int, wanted: int | None) -> int:
    """Bytes to use of those that are there, None for all; raises OSError (ENOSPC) where they are fewer."""
    if wanted is not None and wanted > there:
        raise OSError(errno.ENOSPC, f"has {there} bytes, not {wanted}", name)
    return there if wanted is None else wanted


def address(buffer: memoryview) -> int:
    """Where a buffer lies in memory."""
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def aligned(nbytes: int) -> memoryview:
    """Memory that begins at a page, as direct I/O wants it; zeros."""
    return memoryview(mmap.mmap(-1, nbytes))


def pieces(buffer: memoryview, nbytes: int) -> Iterator[memoryview]:
    """A buffer in parts of `nbytes`; the last may be shorter."""
    return (buffer[at : at + nbytes] for at in range(0, buffer.nbytes, nbytes))


class Pool:
    """Aligned buffers of one size, taken and given back."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.buffers = tuple(aligned(nbytes) for _ in range(count))
        self._free = list(self.buffers)

    def take(self) -> memoryview:
        """A buffer; raises BufferError where all are taken."""
        if not self._free:
            raise BufferError(f"all {len(self.buffers)} buffers are taken")
        return self._free.pop()

    def give(self, buffer: memoryview) -> None:
        """Have it taken again."""
        self._free.append(buffer)
