"""Where a block's bytes lie: in memory, in a file behind the page cache, in blocks past it.

A frame has room for a block at its longest, and takes memory or disk only for what was written to it. Every failure
is an OSError that names the file.
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

EXTENTS_PER_FILE = 8  # past the page cache: each file is open, and has a ring
_NORESERVE = 0x4000  # Linux: mmap(2)
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_UNKNOWN = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class Frame(Protocol):
    """The bytes of a block at a tier."""

    def view(self, at: int, nbytes: int) -> memoryview | None:
        """Bytes in place; None where the host cannot reach them."""
        ...

    def load(self, at: int, into: memoryview) -> None:
        """Fill `into` with bytes from `at` on."""
        ...

    def store(self, at: int, data: memoryview) -> None:
        """Write bytes at `at`."""
        ...

    def trim(self, nbytes: int) -> None:
        """Bytes from there on are not needed any more. Never fails."""
        ...

    def free(self) -> None:
        """They are not needed any more. Never fails: whoever frees has nothing to do with this disk."""
        ...


class Store(Protocol):
    """A tier that has frames."""

    def frame(self, block: BlockKey, nbytes: int) -> Frame:
        """Room for a block of at most so many bytes."""
        ...

    def forget(self, request: Hashable) -> None:
        """All frames of a request have been freed."""
        ...

    def close(self) -> None:
        """Nothing is needed any more."""
        ...


def move(source: Frame, target: Frame, first: int, end: int, bounce: Callable[[], memoryview]) -> None:
    """Copy bytes [first, end), in place where one side can be reached, else by way of a buffer."""
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
    """Pages of this process, which the kernel gives when they are first written."""

    def __init__(self, nbytes: int) -> None:
        self._size, self._lock = max(1, nbytes), threading.Lock()
        self._map: mmap.mmap | None = None

    @property
    def buffer(self) -> mmap.mmap:
        """All of it."""
        with self._lock:
            if self._map is None:
                try:
                    self._map = mmap.mmap(-1, self._size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
                except (OSError, OverflowError) as error:
                    says = f"no room for {self._size:,} bytes of K or V in this process"
                    raise OSError(errno.ENOMEM, says) from error
            return self._map

    def view(self, at: int, nbytes: int) -> memoryview:
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
        self._map = None  # given back when the last view of it is gone


class Memory:
    """Frames in this process's memory."""

    def frame(self, block: BlockKey, nbytes: int) -> MemoryFrame:
        return MemoryFrame(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)

    def forget(self, request: Hashable) -> None:
        pass

    def close(self) -> None:
        pass


class CachedFiles:
    """A file for each block, behind the page cache; it has no name, so nothing is left of it.

    read_bytes, hit_bytes: read so far, and found in the page cache; the latter None where the kernel does not say.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.read_bytes, self.hit_bytes = 0, 0 if _NOWAIT else None
        self._lock = threading.Lock()

    def frame(self, block: BlockKey, nbytes: int) -> CachedFrame:
        return CachedFrame(self, block)

    def count(self, read: int, hit: int | None) -> None:
        """Bytes were read, and so many of them found."""
        with self._lock:
            self.read_bytes += read
            self.hit_bytes = None if hit is None or self.hit_bytes is None else self.hit_bytes + hit

    def forget(self, request: Hashable) -> None:
        pass

    def close(self) -> None:
        pass


class CachedFrame:
    """A file behind the page cache."""

    def __init__(self, files: CachedFiles, block: BlockKey) -> None:
        self._files, self._name = files, f"{files.folder}: {block}"
        self._fd = _nameless(files.folder)
        self._lost: OSError | None = None

    def view(self, at: int, nbytes: int) -> None:
        return None

    def load(self, at: int, into: memoryview) -> None:
        hit = self._cached(at, into) if self._files.hit_bytes is not None else None
        done = hit or 0
        while done < len(into):
            count = self._call(os.preadv, [into[done:]], at + done)
            if not count:
                raise OSError(errno.EIO, f"ends before byte {at + len(into)}", self._name)
            done += count
        if hit != len(into):
            self._check_disk()
        self._files.count(len(into), hit)

    def _check_disk(self) -> None:
        """Raise OSError where what comes from the disk may be older than what was written: it never got there."""
        try:
            check_written_back(self._fd, self._name)
        except OSError as error:
            self._lost = error
        if self._lost:
            raise self._lost

    def _cached(self, at: int, into: memoryview) -> int | None:
        """How many bytes come without waiting for a disk; None where this file system cannot say."""
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
                raise OSError(errno.EIO, f"takes nothing at byte {at + done}", self._name)
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
    """Blocks of blocks past the page cache: on a device for all requests, or in files for a few blocks of one.

    open_file: makes a queue with room for so many bytes.
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
    """Blocks that follow each other. A queue belongs to one thread at a time: the lock says whose it is.

    It is the key of its blocks itself, since a block may come back while somebody still reads what it has left.
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
        """Blocks stay as they are."""

    def free(self) -> None:
        with self._lock, suppress(OSError):  # of telling the disk, which is only a favour to it
            self._extents.release(self)


def _nameless(folder: Path) -> int:
    """A new file without a name."""
    with suppress(OSError):
        return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    fd, name = tempfile.mkstemp(dir=folder, prefix=".vcsd-")
    os.unlink(name)
    return fd
