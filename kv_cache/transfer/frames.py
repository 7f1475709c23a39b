"""Storage of a block's bytes: in memory, in a buffered file, or in blocks with direct I/O.

A frame has the address space for a block at its maximum length, and uses memory or disk only for written data. Every
failure is an OSError that names the file.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from csd_io.extents import Extents
from csd_io.folder import check_written_back
from csd_io.queue import Queue, carry_out
from kv_cache.block_table import BlockKey

EXTENTS_PER_FILE = 8  # direct I/O: each file needs a descriptor and an io_uring
_NORESERVE = 0x4000  # Linux: mmap(2)
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_UNKNOWN = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class Frame(Protocol):
    """Bytes of a block in a tier."""

    def view(self, at: int, nbytes: int) -> memoryview | None:
        """View of the bytes in memory; None if the host cannot address them."""
        ...

    def load(self, at: int, into: memoryview) -> None:
        """Read bytes from offset `at` into a buffer."""
        ...

    def store(self, at: int, data: memoryview) -> None:
        """Write bytes at offset `at`."""
        ...

    def trim(self, nbytes: int) -> None:
        """Release the bytes from offset `nbytes` on. Never fails."""
        ...

    def free(self) -> None:
        """Release all bytes. Never fails: the caller cannot handle an error of this disk."""
        ...


class Store(Protocol):
    """A tier that allocates frames."""

    def frame(self, block: BlockKey, nbytes: int) -> Frame:
        """Allocate a frame for a block of at most `nbytes` bytes."""
        ...

    def forget(self, request: Hashable) -> None:
        """Release resources of a request whose frames have all been freed."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


def move(source: Frame, target: Frame, first: int, end: int, bounce: Callable[[], memoryview]) -> None:
    """Copy bytes [first, end): directly if one side is in memory, otherwise through a bounce buffer."""
    if (view := target.view(first, end - first)) is not None:
        source.load(first, view)
    elif (view := source.view(first, end - first)) is not None:
        target.store(first, view)
    else:
        buffer = bounce()
        for at in range(first, end, len(buffer)):
            part = buffer[: min(len(buffer), end - at)]
            source.load(at, part)
            target.store(at, part)


class MemoryFrame:
    """Anonymous pages of this process, allocated by the kernel at the first write."""

    def __init__(self, nbytes: int) -> None:
        self._size, self._lock = max(1, nbytes), threading.Lock()
        self._map: mmap.mmap | None = None

    @property
    def buffer(self) -> mmap.mmap:
        """The whole mapping."""
        with self._lock:
            if self._map is None:
                try:
                    self._map = mmap.mmap(-1, self._size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
                except (OSError, OverflowError) as error:
                    message = f"cannot allocate {self._size:,} bytes of the KV cache in this process: lower the limits"
                    raise OSError(errno.ENOMEM, message) from error
            return self._map

    def view(self, at: int, nbytes: int) -> memoryview:
        assert 0 <= at <= at + nbytes <= self._size, f"bytes {at} to {at + nbytes} of a frame of {self._size}"
        return memoryview(self.buffer)[at : at + nbytes]

    def load(self, at: int, into: memoryview) -> None:
        into[:] = self.view(at, len(into))

    def store(self, at: int, data: memoryview) -> None:
        self.view(at, len(data))[:] = data

    def trim(self, nbytes: int) -> None:
        first = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._map is not None and first < self._size:
            self._map.madvise(mmap.MADV_DONTNEED, first, self._size - first)

    def free(self) -> None:
        self._map, self._size = None, 0  # unmapped when the last view of it is released


class Memory:
    """Frames in this process's memory."""

    def frame(self, block: BlockKey, nbytes: int) -> MemoryFrame:
        return MemoryFrame(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)

    def forget(self, request: Hashable) -> None:
        pass

    def close(self) -> None:
        pass


class CachedFiles:
    """A buffered file for each block. The files have no name, so they vanish with the process.

    Attributes:
        read_bytes: Bytes read so far.
        hit_bytes: Bytes of these found in the page cache; None if the kernel does not report it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.read_bytes, self.hit_bytes = 0, 0 if _NOWAIT else None
        self._lock = threading.Lock()

    def frame(self, block: BlockKey, nbytes: int) -> CachedFrame:
        return CachedFrame(self, block)

    def count(self, read: int, hit: int | None) -> None:
        """Add to the counters."""
        with self._lock:
            self.read_bytes += read
            self.hit_bytes = None if hit is None or self.hit_bytes is None else self.hit_bytes + hit

    def forget(self, request: Hashable) -> None:
        pass

    def close(self) -> None:
        pass


class CachedFrame:
    """A buffered file."""

    def __init__(self, files: CachedFiles, block: BlockKey) -> None:
        self._files, self._name = files, f"{files.folder}: {block}"
        self._fd = _open_unnamed(files.folder)
        self._lost: OSError | None = None

    def view(self, at: int, nbytes: int) -> None:
        return None

    def load(self, at: int, into: memoryview) -> None:
        hit = self._cached(at, into) if self._files.hit_bytes is not None else None
        done = hit or 0
        while done < len(into):
            count = self._call(os.preadv, [into[done:]], at + done)
            if not count:
                raise OSError(errno.EIO, f"file ends before byte {at + len(into)}", self._name)
            done += count
        if hit != len(into):
            self._check_disk()
        self._files.count(len(into), hit)

    def _check_disk(self) -> None:
        """Raise OSError if the write-back of earlier data failed: a read from the disk may return older data."""
        try:
            check_written_back(self._fd, self._name)
        except OSError as error:
            self._lost = error
        if self._lost:
            raise self._lost

    def _cached(self, at: int, into: memoryview) -> int | None:
        """Number of bytes read from the page cache alone; None if this file system cannot tell."""
        done = 0
        while done < len(into):
            try:
                count = os.preadv(self._fd, [into[done:]], at + done, _NOWAIT)
            except OSError as error:
                return None if error.errno in _UNKNOWN else done
            if not count:
                break
            done += count
        return done

    def store(self, at: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            count = self._call(os.pwritev, [data[done:]], at + done)
            if not count:
                raise OSError(errno.EIO, f"write accepted no bytes at offset {at + done}", self._name)
            done += count

    def _call(self, call: Callable[..., int], buffers: list[memoryview], at: int) -> int:
        try:
            return call(self._fd, buffers, at)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._name) from error

    def trim(self, nbytes: int) -> None:
        with suppress(OSError):
            if os.fstat(self._fd).st_size > nbytes:
                os.ftruncate(self._fd, nbytes)

    def free(self) -> None:
        with suppress(OSError):
            os.close(self._fd)
        self._fd = -1


class DirectBlocks:
    """Extents with direct I/O: on one device for all requests, or in files for a few extents of one request.

    Args:
        shared: Queue of the device.
        open_file: Creates a queue for a file of the given size, bytes.
    """

    def __init__(self, shared: Queue | None = None, open_file: Callable[[int], Queue] | None = None) -> None:
        self._shared = Extents(shared) if shared else None
        self._open = open_file
        self._files: dict[Hashable, list[Extents]] = {}
        self._lock = threading.Lock()

    def frame(self, block: BlockKey, nbytes: int) -> DirectFrame:
        with self._lock:
            for extents in self._files.get(block.request, []) if self._shared is None else [self._shared]:
                try:
                    return DirectFrame(extents, block, nbytes, self._lock)
                except OSError:
                    if self._shared:
                        raise
            assert self._open is not None
            extents = Extents(self._open(nbytes * EXTENTS_PER_FILE))
            self._files.setdefault(block.request, []).append(extents)
            return DirectFrame(extents, block, nbytes, self._lock)

    def forget(self, request: Hashable) -> None:
        for extents in self._files.pop(request, []):
            extents.queue.close()

    def close(self) -> None:
        for request in list(self._files):
            self.forget(request)
        if self._shared:
            self._shared.queue.close()


class DirectFrame:
    """Consecutive device blocks. A queue may be used by one thread at a time, so the lock is held for each transfer.

    The frame object itself is the key of its extent: the same KV block can be allocated again while its old extent is
    still read.
    """

    def __init__(self, extents: Extents, block: BlockKey, nbytes: int, lock: threading.Lock) -> None:
        self._extents, self._extent, self._lock = extents, block, lock
        extents.bind(self, nbytes)

    def __str__(self) -> str:
        return str(self._extent)

    def view(self, at: int, nbytes: int) -> None:
        return None

    def load(self, at: int, into: memoryview) -> None:
        with self._lock:
            carry_out(self._extents.queue, self._extents.requests("read", self, at, into))

    def store(self, at: int, data: memoryview) -> None:
        with self._lock:
            carry_out(self._extents.queue, self._extents.requests("write", self, at, data))

    def trim(self, nbytes: int) -> None:
        """Nothing to do: device blocks are released together."""

    def free(self) -> None:
        with self._lock, suppress(OSError):  # the discard command is only a hint to the disk
            self._extents.release(self)


def _open_unnamed(folder: Path) -> int:
    """Create a file without a name."""
    with suppress(OSError):
        return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    fd, name = tempfile.mkstemp(dir=folder, prefix=".vcsd-")
    os.unlink(name)
    return fd
