"""Folder of files that outlive a drive's process, on a disk or on a simulated disk.

Every failure is an OSError with the file's name. Nothing is memory-mapped: a full or failing disk is an error of the
call that hit it, never a signal.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol

Bytes = bytes | bytearray | memoryview
Durability = Literal["process", "host"]
DURABILITIES: tuple[Durability, ...] = ("process", "host")
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # Linux: fallocate(2)
_WAIT_BEFORE = 1  # Linux: sync_file_range(2)
_NO_HOLES = (errno.EOPNOTSUPP, errno.ENOSYS)


def suggest_fix(error: OSError) -> str:
    """Suggest a fix for a disk that could not be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "free space on that disk" if full else "check that disk"


def open_file(path: Path, flags: int) -> int:
    """Open a file of bytes; raises OSError for a FIFO, a device or a folder, which would hang or be changed."""
    with suppress(FileNotFoundError):  # before it is opened, too: opening alone does something to a device
        _check_regular(path.stat().st_mode, path)
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        _check_regular(os.fstat(fd).st_mode, path)
    except OSError:
        os.close(fd)
        raise
    return fd


def _check_regular(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "is not a file: remove it, or put the drive's file there", str(path))


def read_file(path: Path) -> bytes:
    """Read a whole file, see `open_file`."""
    with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
        return file.read()


class File(Protocol):
    """Bytes at offsets, of a fixed size; bytes that were never written read as zeros."""

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into`, starting at `offset`."""
        ...

    def write(self, offset: int, data: Bytes) -> None:
        """Write all of `data`."""
        ...

    def discard(self, offset: int, size: int) -> None:
        """Zero the bytes and release their space."""
        ...

    def written(self) -> list[tuple[int, int]]:
        """Byte ranges [first, end), ascending; everything outside of them was never written."""
        ...


class Folder(Protocol):
    """Files by name."""

    name: str

    def sizes(self) -> dict[str, int]:
        """Existing files and their sizes, bytes."""
        ...

    def open(self, name: str, size: int) -> File:
        """Open a file; create it with `size` bytes if it does not exist."""
        ...

    def read(self, name: str) -> bytes:
        """Read a small file; raises FileNotFoundError."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Create or replace a small file atomically."""
        ...

    def rename(self, name: str, to: str) -> None:
        """Rename a file, replacing an existing one."""
        ...

    def remove(self, name: str) -> None:
        """Delete a file if it exists."""
        ...

    def free_bytes(self) -> int:
        """Free space of the disk, bytes."""
        ...

    def sync(self) -> None:
        """Make everything that was written durable."""
        ...


class DiskFile:
    """A file on a disk."""

    def __init__(self, path: Path, size: int | None, writable: bool) -> None:
        """`size` is that of a new file; None opens an existing one."""
        create = os.O_CREAT if size is not None else 0
        flags = os.O_RDWR | create if writable else os.O_RDONLY
        self.path, self._fd = path, open_file(path, flags)
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
            punch_hole(self._fd, offset, size, str(self.path))
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
        """Truncate the file, or extend it with zeros."""
        os.ftruncate(self._fd, size)

    def sync(self) -> None:
        """Make everything that was written durable."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class DiskFolder:
    """A folder on a disk, accessible only to its owner.

    Args:
        durability: What data survives after `sync`. `process`: the exit of this process, so nothing has to be waited
            for; `host`: also a power loss of this machine.
        writable: Whether files may be changed.
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
        return read_file(self.path / name)

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
        stat = os.statvfs(self.path)
        return stat.f_bavail * stat.f_frsize

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
        """Close all files."""
        while self._open:
            self._open.pop().close()


_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_sync_file_range = ctypes.CDLL(None, use_errno=True).sync_file_range
_sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def punch_hole(fd: int, offset: int, size: int, name: str) -> None:
    """Punch a hole: bytes read as zeros and take no space. Raises OSError, EOPNOTSUPP or ENOSYS if unsupported."""
    if _fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, size):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)


def check_written_back(fd: int, name: str) -> None:
    """Raise OSError if the kernel could not write some of a file back to its disk; each failure is reported once.

    This writes nothing. Lost data stays in the page cache for a while, and then disappears.
    """
    if _sync_file_range(fd, 0, 0, _WAIT_BEFORE):
        code = ctypes.get_errno()
        if code not in _NO_HOLES:
            raise OSError(code, os.strerror(code), name)


def allocate(fd: int, offset: int, size: int, name: str) -> None:
    """Reserve disk space for a byte range; raises OSError if there is too little, ignores unsupported file systems."""
    disk = os.fstatvfs(fd)
    if size > disk.f_bavail * disk.f_frsize:  # a failed attempt would leave the disk full
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
    try:
        os.posix_fallocate(fd, offset, size)
    except OSError as error:
        if error.errno not in (*_NO_HOLES, errno.EINVAL, errno.ESPIPE, errno.ENODEV):
            raise OSError(error.errno, error.strerror, name) from error
