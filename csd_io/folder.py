"""A folder of files: what a drive keeps beyond its process, on a disk or on a simulated one.

Every failure is an OSError that names the file. Nothing is mapped: a full or failing disk is an error of the call that
met it, never a signal.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Protocol

Bytes = bytes | bytearray | memoryview
Durability = Literal["process", "host"]
DURABILITIES: tuple[Durability, ...] = ("process", "host")
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # Linux: fallocate(2)
_WAIT_BEFORE = 1  # Linux: sync_file_range(2)
_NO_HOLES = (errno.EOPNOTSUPP, errno.ENOSYS)


def remedy(error: OSError) -> str:
    """What to do about a disk that could not be written to."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "free some of that disk" if full else "look after that disk"


class File(Protocol):
    """Bytes at offsets, of a fixed size; what was never written reads as zeros."""

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` from `offset` on."""
        ...

    def write(self, offset: int, data: Bytes) -> None:
        """Write all of `data`."""
        ...

    def discard(self, offset: int, size: int) -> None:
        """Let the bytes read as zeros, and give their space back."""
        ...

    def written(self) -> list[tuple[int, int]]:
        """Byte ranges [first, end), ascending, outside of which nothing was ever written."""
        ...


class Folder(Protocol):
    """Files by name."""

    name: str

    def sizes(self) -> dict[str, int]:
        """The files that there are, and their bytes."""
        ...

    def open(self, name: str, size: int) -> File:
        """A file, made with `size` bytes where there is none."""
        ...

    def read(self, name: str) -> bytes:
        """A small file whole; raises FileNotFoundError."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Make or replace a small file: at every moment there is the old one or the new one, whole."""
        ...

    def rename(self, name: str, to: str) -> None:
        """Give a file another name, in place of one that has it."""
        ...

    def remove(self, name: str) -> None:
        """Delete a file, if it is there."""
        ...

    def free_bytes(self) -> int:
        """Room on the disk."""
        ...

    def sync(self) -> None:
        """Return when all that was written is durable."""
        ...


class DiskFile:
    """A file on a disk."""

    def __init__(self, path: Path, size: int | None, writable: bool) -> None:
        """size: of a new file; None where it has to be there."""
        made = os.O_CREAT if size is not None else 0
        flags = os.O_RDWR | made if writable else os.O_RDONLY
        self.path, self._fd = path, os.open(path, flags | os.O_CLOEXEC, 0o600)
        if size:
            os.ftruncate(self._fd, size)

    def read(self, offset: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            try:
                count = os.preadv(self._fd, [into[done:]], offset + done)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            if not count:
                raise OSError(errno.EIO, f"ends before byte {offset + len(into)}", str(self.path))
            done += count

    def write(self, offset: int, data: Bytes) -> None:
        view, done = memoryview(data), 0
        try:
            while done < len(view):
                done += os.pwrite(self._fd, view[done:], offset + done)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def discard(self, offset: int, size: int) -> None:
        try:
            punch(self._fd, offset, size, str(self.path))
        except OSError as error:
            if error.errno not in _NO_HOLES:
                raise
            self.write(offset, bytes(size))

    def written(self) -> list[tuple[int, int]]:
        return list(self._ranges())

    def _ranges(self) -> Iterator[tuple[int, int]]:
        end, size = 0, os.fstat(self._fd).st_size
        while end < size:
            try:
                first = os.lseek(self._fd, end, os.SEEK_DATA)
            except OSError:  # nothing but a hole up to the end
                return
            end = os.lseek(self._fd, first, os.SEEK_HOLE)
            yield first, end

    def resize(self, size: int) -> None:
        """Cut it, or let it end in zeros."""
        os.ftruncate(self._fd, size)

    def sync(self) -> None:
        """Return when what was written is durable."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        """Let go of it."""
        os.close(self._fd)


class DiskFolder:
    """A folder on a disk, for its owner only.

    durability: what `sync` is for. `process`: what was written outlives this process, however it ends, and nothing has
    to be waited for; `host`: it outlives a power cut of this machine too. writable: whether it may be changed.
    """

    def __init__(self, path: Path, durability: Durability = "process", writable: bool = True) -> None:
        self.path, self.name = path, str(path)
        self._durable, self._writable = durability == "host", writable
        self._open: list[DiskFile] = []

    def sizes(self) -> dict[str, int]:
        return {file.name: file.stat().st_size for file in self.path.iterdir() if file.is_file()}

    def open(self, name: str, size: int) -> DiskFile:
        path = self.path / name
        there = not self._writable or (path.exists() and path.stat().st_size > 0)
        self._open.append(DiskFile(self.path / name, None if there else size, self._writable))
        return self._open[-1]

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def put(self, name: str, data: bytes) -> None:
        aside = self.path / f"{name}.new"
        aside.unlink(missing_ok=True)
        file = DiskFile(aside, 0, True)
        try:
            file.write(0, data)
            file.sync()
        finally:
            file.close()
        aside.replace(self.path / name)
        self._sync_names()

    def rename(self, name: str, to: str) -> None:
        (self.path / name).replace(self.path / to)
        self._sync_names()

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def free_bytes(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def sync(self) -> None:
        if self._durable:
            for file in self._open:
                file.sync()

    def _sync_names(self) -> None:
        if self._durable:
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def close(self) -> None:
        """Let go of its files."""
        while self._open:
            self._open.pop().close()


_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_sync_file_range = ctypes.CDLL(None, use_errno=True).sync_file_range
_sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def punch(fd: int, offset: int, size: int, name: str) -> None:
    """Let bytes of a file read as zeros and take no room; raises OSError, EOPNOTSUPP or ENOSYS where it cannot."""
    if _fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, size):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)


def check_written_back(fd: int, name: str) -> None:
    """Raise OSError where the kernel could not write some of a file to its disk; of each failure it tells once.

    Nothing is written for that. What could not be is in the page cache for a while, and then nowhere.
    """
    if _sync_file_range(fd, 0, 0, _WAIT_BEFORE):
        code = ctypes.get_errno()
        if code not in _NO_HOLES:
            raise OSError(code, os.strerror(code), name)


def allocate(fd: int, offset: int, size: int, name: str) -> None:
    """Have the disk keep room for bytes of a file; raises OSError where it has not, nothing where it cannot say."""
    disk = os.fstatvfs(fd)
    if size > disk.f_bavail * disk.f_frsize:  # asked in vain, a disk would be full afterwards
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
    try:
        os.posix_fallocate(fd, offset, size)
    except OSError as error:
        if error.errno not in (*_NO_HOLES, errno.EINVAL, errno.ESPIPE, errno.ENODEV):
            raise OSError(error.errno, error.strerror, name) from error
