"""Storage of windows: memory mapped by both sides, and files or block devices that the host reads and writes."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import weakref
from pathlib import Path

from csd_io.folder import allocate
from csd_link.window import BLOCK_BYTES, MAGIC

Buffer = bytes | bytearray | memoryview
_PART = 256  # blocks that are allocated at once


class MappedMedium:
    """Blocks of a memory-mapped file from `offset_bytes` on: shared memory, or a device's backing memory.

    `blocks` = None uses the whole file. `create` makes a new file.
    """

    def __init__(self, path: Path, offset_bytes: int = 0, blocks: int | None = None) -> None:
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            if blocks is not None and path.is_char_device():  # a memory device has no size
                size = offset_bytes + blocks * BLOCK_BYTES
            self.blocks = (size - offset_bytes) // BLOCK_BYTES if blocks is None else blocks
            if self.blocks < 1 or offset_bytes % BLOCK_BYTES or offset_bytes + self.blocks * BLOCK_BYTES > size:
                raise ValueError(f"{path}: {size} bytes have no room for {self.blocks} blocks at {offset_bytes}")
            self._map = mmap.mmap(file.fileno(), self.blocks * BLOCK_BYTES, offset=offset_bytes)
            self._fd = os.dup(file.fileno()) if path.is_file() else None
        self._name, self._offset, self._kept = str(path), offset_bytes, set[int]()
        weakref.finalize(self, os.close, self._fd) if self._fd is not None else None
        self.view = memoryview(self._map)

    @staticmethod
    def create(path: Path, size_bytes: int) -> None:
        """Create a sparse file, accessible only to its owner, which appears atomically with its full size.

        Raises FileExistsError if it exists.
        """
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        os.close(os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            os.truncate(aside, size_bytes)
            os.link(aside, path)  # unlike a rename, it does not replace one that is there
        finally:
            aside.unlink()

    def _keep(self, block: int, count: int) -> None:
        """Allocate blocks before they are touched; raises OSError if the disk or memory is full."""
        for part in range(block // _PART, (block + count - 1) // _PART + 1):
            if self._fd is not None and part not in self._kept:
                size = min(_PART, self.blocks - part * _PART) * BLOCK_BYTES
                allocate(self._fd, self._offset + part * _PART * BLOCK_BYTES, size, self._name)
                self._kept.add(part)

    def read(self, block: int, count: int = 1) -> bytearray:
        self._keep(block, count)
        return bytearray(self.view[block * BLOCK_BYTES : (block + count) * BLOCK_BYTES])

    def write(self, block: int, data: Buffer) -> None:
        self._keep(block, -(-len(data) // BLOCK_BYTES))
        at = block * BLOCK_BYTES
        self.view[at : at + len(data)] = data


class FileMedium:
    """Blocks of a file or a block device, accessed with aligned reads and writes of whole blocks.

    A block device is opened with O_DIRECT, so that each access reaches the drive; a regular file shares the page cache
    with processes that map it.
    """

    def __init__(self, path: Path, offset_bytes: int = 0, max_bytes: int = 1 << 20) -> None:
        direct = os.O_DIRECT if stat.S_ISBLK(path.stat().st_mode) else 0
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | direct)
        self._name, self._offset = str(path), offset_bytes
        self.blocks = (os.lseek(self._fd, 0, os.SEEK_END) - offset_bytes) // BLOCK_BYTES
        self._max_bytes = max_bytes

    def read(self, block: int, count: int = 1) -> bytearray:
        out = bytearray()
        for at, size in self._parts(block, count * BLOCK_BYTES):
            buffer = mmap.mmap(-1, size)  # page-aligned, as O_DIRECT requires
            if os.preadv(self._fd, [buffer], at) != size:
                raise OSError(f"window: short read at byte {at}")
            out += buffer
        return out

    def write(self, block: int, data: Buffer) -> None:
        view, done = memoryview(data), 0
        for at, size in self._parts(block, -(-len(view) // BLOCK_BYTES) * BLOCK_BYTES):
            buffer = mmap.mmap(-1, size)
            part = view[done : done + size]
            buffer[: len(part)] = part
            try:
                written = os.pwrite(self._fd, buffer, at)
            except OSError as error:
                raise OSError(error.errno, error.strerror, self._name) from error
            if written != size:
                raise OSError(errno.ENOSPC, f"short write at byte {at}", self._name)
            done += size

    def _parts(self, block: int, size: int) -> list[tuple[int, int]]:
        """Byte offsets and sizes of at most `max_bytes`."""
        first, end = self._offset + block * BLOCK_BYTES, self._offset + block * BLOCK_BYTES + size
        return [(at, min(self._max_bytes, end - at)) for at in range(first, end, self._max_bytes)]

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        with contextlib.suppress(OSError):  # the mount's drive has died; the descriptor is closed anyway
            os.close(fd)


def make_window_file(path: Path, size_bytes: int) -> None:
    """Create a file for windows, or extend an existing one; raises ValueError for a file with other content."""
    if not path.exists():
        MappedMedium.create(path, size_bytes)
    elif path.is_file():
        with path.open("r+b") as file:
            begins = file.read(len(MAGIC))
            if begins.strip(b"\0") and begins != MAGIC:
                raise ValueError(f"{path} holds something else than a window: name a new file")
            file.truncate(max(size_bytes, path.stat().st_size))
