"""Asynchronous block I/O with several requests in flight.

A `Queue` is used by one thread at a time. Every failure is an OSError with the file's name; an invalid request
(unaligned, too long, beyond the end) is a ValueError before anything is submitted.
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
class IoRequest:
    """Read to or write from `buffer` at byte `offset`. The queue owns the buffer until the request is complete."""

    op: Op
    offset: int
    buffer: memoryview


@dataclass(frozen=True, slots=True)
class IoCompletion:
    """A completed request; `error` is None if all of its bytes were transferred."""

    request: IoRequest
    error: OSError | None


class Queue(Protocol):
    """Blocks of a file or a device.

    Attributes:
        size_bytes: Total size.
        block_bytes: Required alignment of offsets, sizes and buffer addresses.
        max_bytes: Maximum size of one request.
        depth: Maximum number of requests in flight.
    """

    name: str
    size_bytes: int
    block_bytes: int
    max_bytes: int
    depth: int

    @property
    def how(self) -> str:
        """Name of the I/O interface in use, for display."""
        ...

    def register(self, buffers: Sequence[memoryview]) -> None:
        """Register buffers for repeated use; a no-op if the queue does not benefit from it."""
        ...

    def submit(self, requests: Sequence[IoRequest]) -> None:
        """Submit requests; raises ValueError if more than `depth` would be in flight."""
        ...

    def reap(self, at_least: int) -> list[IoCompletion]:
        """Wait for `at_least` completions (at most those in flight); returns all available ones, in any order."""
        ...

    def discard(self, offset: int, size: int) -> None:
        """Discard bytes, whose content is then undefined; raises OSError (EOPNOTSUPP) if unsupported."""
        ...

    def sync(self) -> None:
        """Make everything that was written durable."""
        ...

    def close(self) -> None:
        """Wait for all requests in flight, then close the file."""
        ...


def carry_out(queue: Queue, requests: Iterable[IoRequest], depth: int | None = None) -> None:
    """Execute requests, up to `depth` in flight; raises the OSError of the first failure.

    On success or failure, no request is in flight afterwards.

    Args:
        depth: Limit below the queue's own one; None uses the queue's.
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
                assert flying >= 0, f"{queue.name}: a request completed twice"
                failed = failed or ended.error
        raise failed
    finally:
        if flying:
            queue.reap(flying)


def check(queue: Queue, requests: Sequence[IoRequest], flying: int) -> None:
    """Raise ValueError for requests that are invalid while `flying` others are in flight."""
    if flying + len(requests) > queue.depth:
        raise ValueError(f"{queue.name}: {flying + len(requests)} requests in flight, at most {queue.depth}")
    for request in requests:
        size = request.buffer.nbytes
        if (request.offset | size | address(request.buffer)) % queue.block_bytes:
            raise ValueError(f"{queue.name}: {size} bytes at {request.offset}: not aligned to {queue.block_bytes}")
        if not 0 < size <= queue.max_bytes or not 0 <= request.offset <= queue.size_bytes - size:
            limits = f"at most {queue.max_bytes} of {queue.size_bytes}"
            raise ValueError(f"{queue.name}: {size} bytes at {request.offset}: {limits}")


def outcome(name: str, request: IoRequest, result: int) -> IoCompletion:
    """Completion of a request that transferred `result` bytes, or failed with -errno; a short transfer is a failure."""
    if result == request.buffer.nbytes:
        return IoCompletion(request, None)
    if result < 0:
        return IoCompletion(request, OSError(-result, os.strerror(-result), name))
    short = f"{request.op} of {request.buffer.nbytes} bytes at {request.offset} ended after {result}"
    return IoCompletion(request, OSError(errno.EIO, short, name))


def clamp_size(name: str, there: int, wanted: int | None) -> int:
    """Bytes to use of the available ones (None: all); raises OSError (ENOSPC) if there are too few."""
    if wanted is not None and wanted > there:
        raise OSError(errno.ENOSPC, f"has {there} bytes, {wanted} are needed", name)
    return there if wanted is None else wanted


def address(buffer: memoryview) -> int:
    """Memory address of a buffer."""
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def aligned(nbytes: int) -> memoryview:
    """Allocate zeroed, page-aligned memory, as direct I/O requires."""
    return memoryview(mmap.mmap(-1, nbytes))


def pieces(buffer: memoryview, nbytes: int) -> Iterator[memoryview]:
    """Split a buffer into parts of `nbytes` bytes; the last one may be shorter."""
    return (buffer[at : at + nbytes] for at in range(0, buffer.nbytes, nbytes))
