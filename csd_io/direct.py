"""Direct I/O queues: on a temporary file, a block device, an NVMe namespace, or a mounted drive's file."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import struct
import tempfile
from pathlib import Path

from csd_io.blocks import BlockQueue
from csd_io.folder import allocate, punch_hole
from csd_io.nvme import NvmeTarget
from csd_io.queue import IoCompletion, IoRequest, Queue, address, aligned, carry_out, clamp_size, outcome
from csd_io.ring import READ, READ_FIXED, WRITE, WRITE_FIXED, Ring
from csd_io.signatures import LOOK_BYTES, blkid, detect_signature

DEPTH = 32
FILE_BLOCK_BYTES = 4096  # alignment that direct I/O accepts on every disk
MAX_BYTES = 1 << 20  # per request to a file or block device; the kernel splits it as the device requires
_BLOCK_BYTES, _DISCARD = 0x1268, 0x1277  # BLKSSZGET, BLKDISCARD, linux/fs.h
_IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}  # statfs(2); their O_DIRECT is the page cache
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)

_libc = ctypes.CDLL(None, use_errno=True)


def open_queue(path: Path, size_bytes: int | None = None, depth: int = DEPTH, allow_overwrite: bool = False) -> Queue:
    """Open a queue over a folder's disk, a file, a block device or an NVMe character device (/dev/ng0n1).

    Args:
        path: A folder gets an unnamed, fully allocated file of `size_bytes`, which disappears when the process exits.
        size_bytes: Bytes to use; None uses the whole file or device.
        depth: Maximum number of requests in flight.
        allow_overwrite: Overwrite content: a file system or the like on a device, nonzero bytes at the start of a file.

    Raises:
        OSError: No space (ENOSPC), in use or not empty (EBUSY), direct I/O not supported (EINVAL).
    """
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        if not size_bytes:
            raise ValueError(f"{path}: is a folder: how many bytes of its disk are needed (size_bytes)")
        return BlockQueue(FileTarget(_create_unnamed(path), str(path), size_bytes, True), depth)
    if stat.S_ISCHR(mode):
        queue = BlockQueue(NvmeTarget(path, size_bytes), depth)
    elif stat.S_ISBLK(mode) or stat.S_ISREG(mode):
        held_alone = os.O_EXCL if stat.S_ISBLK(mode) else 0  # the kernel refuses it if it is mounted
        queue = BlockQueue(FileTarget(_open(path, held_alone), str(path), size_bytes, False), depth)
    else:
        raise OSError(errno.EINVAL, "neither a folder, a file nor a device", str(path))
    try:
        if not allow_overwrite and (what := _existing_content(path, queue)):
            raise OSError(
                errno.EBUSY,
                f"holds {what}; it is only written to with --allow-overwrite, or allow_overwrite=True",
                str(path),
            )
    except OSError:
        queue.close()
        raise
    return queue


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC | flags, 0o600)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise OSError(errno.EINVAL, "no direct I/O on this file system", str(path)) from error
        raise


def _create_unnamed(folder: Path) -> int:
    """Create a file without a name."""
    try:
        return _open(folder, os.O_TMPFILE)
    except OSError as error:
        if error.errno not in _NO_NAMELESS:
            raise
    fd, name = tempfile.mkstemp(dir=folder, prefix=".vcsd-")
    try:
        return _open(Path(name), 0)
    finally:
        os.unlink(name)
        os.close(fd)


def _existing_content(path: Path, queue: Queue) -> str | None:
    """Describe existing content; None if there is none."""
    begins = aligned(min(LOOK_BYTES, queue.size_bytes) // queue.block_bytes * queue.block_bytes)
    parts = range(0, begins.nbytes, queue.max_bytes)
    carry_out(queue, [IoRequest("read", at, begins[at : at + queue.max_bytes]) for at in parts])
    if path.is_file():
        return "nonzero bytes" if any(begins) else None
    return detect_signature(begins) or blkid(path.with_name(path.name.replace("ng", "nvme", 1)))


class FileTarget:
    """A file or block device, opened for direct I/O."""

    uses_sqe128 = False

    def __init__(self, fd: int, name: str, size_bytes: int | None, new: bool) -> None:
        """`new` marks a file that is to be allocated; otherwise size_bytes = None uses the existing size."""
        self._fd, self.name, self.max_bytes = fd, name, MAX_BYTES
        self._device = stat.S_ISBLK(os.fstat(fd).st_mode)
        try:
            if not self._device and (kind := _in_memory(fd)):
                raise OSError(errno.EINVAL, f"{kind} keeps its files in memory: no direct I/O", name)
            self.block_bytes = _logical_block_bytes(fd) if self._device else FILE_BLOCK_BYTES
            if new and size_bytes:
                os.ftruncate(fd, -(-size_bytes // self.block_bytes) * self.block_bytes)
                allocate(fd, 0, os.fstat(fd).st_size, name)
            there = os.lseek(fd, 0, os.SEEK_END)
            self.size_bytes = clamp_size(name, there // self.block_bytes * self.block_bytes, size_bytes)
        except OSError:
            os.close(fd)
            raise

    def prepare(self, ring: Ring, number: int, request: IoRequest, fixed: int | None) -> None:
        read, where = request.op == "read", address(request.buffer)
        plain, registered = (READ, READ_FIXED) if read else (WRITE, WRITE_FIXED)
        op = plain if fixed is None else registered
        ring.move(op, self._fd, request.offset, (where, request.buffer.nbytes, fixed or 0), number)

    def move(self, request: IoRequest) -> int:
        move = os.preadv if request.op == "read" else os.pwritev
        return move(self._fd, [request.buffer], request.offset)

    def outcome(self, request: IoRequest, result: int) -> IoCompletion:
        return outcome(self.name, request, result)

    def discard(self, offset: int, size: int) -> None:
        if self._device:
            fcntl.ioctl(self._fd, _DISCARD, struct.pack("<QQ", offset, size))
        else:
            punch_hole(self._fd, offset, size, self.name)

    def sync(self) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.name) from error

    def close(self) -> None:
        os.close(self._fd)


def _in_memory(fd: int) -> str | None:
    """Name of a memory-backed file system if a file is on one; the type is the first word of `struct statfs`."""
    status = ctypes.create_string_buffer(256)
    _libc.fstatfs(fd, status)
    return _IN_MEMORY.get(struct.unpack_from("<l", status)[0])


def _logical_block_bytes(fd: int) -> int:
    size = bytearray(4)
    fcntl.ioctl(fd, _BLOCK_BYTES, size)
    return int(struct.unpack("<i", size)[0])
