"""NVMe commands through Linux passthrough: Identify, and block access that bypasses the block layer."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
from pathlib import Path
from typing import Any

from csd_io.queue import IoCompletion, IoRequest, address, clamp_size
from csd_io.ring import Ring

READ, WRITE = 0x02, 0x01
_FLUSH, _MANAGE = 0x00, 0x09  # Dataset Management
_DEALLOCATE = 4
_IDENTIFY = 0x06
_MPS_BYTES = 4096  # unit of MDTS; Linux on x86 knows no controller with a larger minimum page size
_NO_MDTS_BYTES = 1 << 20  # limit for controllers that report no MDTS
_MOST_LBAS = 1 << 16  # per read or write

# struct nvme_passthru_cmd, linux/nvme_ioctl.h: opcode, flags, namespace, dwords 2 and 3, metadata, address, bytes of
# both, dwords 10 to 15, timeout in ms, result
_COMMAND = struct.Struct("<BBHIIIQQIIIIIIIIII")
_ADMIN, _IO = 0xC0484E41, 0xC0484E43
NAMESPACE_ID, URING_IO = 0x4E40, 0xC0484E80
_TIMEOUT_MS = 5000


def pack_command(opcode: int, nsid: int, where: int, size: int, *dwords: int) -> bytes:
    """Encode a command with one buffer and CDW10 to CDW15."""
    values = (*dwords, *(0,) * (6 - len(dwords)))
    return _COMMAND.pack(opcode, 0, 0, nsid, 0, 0, 0, where, 0, size, *values, _TIMEOUT_MS, 0)


def io_command(fd: int, opcode: int, nsid: int, buffer: mmap.mmap | None, size: int, *dwords: int) -> None:
    """Submit an I/O command and wait for it; raises OSError with the NVMe status."""
    _issue(fd, _IO, opcode, nsid, buffer, size, *dwords)


def _issue(fd: int, kind: int, opcode: int, nsid: int, buffer: mmap.mmap | None, size: int, *dwords: int) -> None:
    where = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if buffer else 0
    status = fcntl.ioctl(fd, kind, bytearray(pack_command(opcode, nsid, where, size, *dwords)))
    if status:
        raise OSError(errno.EIO, f"NVMe command {opcode:#04x}: status {status:#05x}")


def identify_controller(path: Path) -> dict[str, Any]:
    """Identify Controller data of a device file, with nvme-cli's key names (`nvme id-ctrl`)."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return identify_open_controller(fd)
    finally:
        os.close(fd)


def execute_command(fd: int, command: bytes) -> int:
    """Execute an encoded I/O command; returns its NVMe status."""
    return int(fcntl.ioctl(fd, _IO, bytearray(command)))


def identify_open_controller(fd: int) -> dict[str, Any]:
    """Identify Controller data of an open device file; see `identify_controller`."""
    page = mmap.mmap(-1, 4096)
    _issue(fd, _ADMIN, _IDENTIFY, 0, page, 4096, 1)
    return parse_controller(page[:])


def parse_controller(page: bytes) -> dict[str, Any]:
    """Decode an Identify Controller page (NVMe Base Specification 2.0, figure 275)."""
    vid, ssvid = struct.unpack_from("<HH", page)
    mdts, cntlid, ver = page[77], *struct.unpack_from("<HI", page, 78)
    (nn,) = struct.unpack_from("<I", page, 516)
    texts = (page[at:end].decode("ascii", "replace").strip("\0 ") for at, end in ((4, 24), (24, 64), (64, 72)))
    serial, model, firmware = texts
    return {
        "vid": vid,
        "ssvid": ssvid,
        "sn": serial,
        "mn": model,
        "fr": firmware,
        "mdts": mdts,
        "cntlid": cntlid,
        "ver": ver,
        "nn": nn,
    }


def identify_namespace(fd: int) -> tuple[int, int, int]:
    """Namespace ID of an open namespace, its number of LBAs and the bytes per LBA."""
    try:
        nsid, page = fcntl.ioctl(fd, NAMESPACE_ID), mmap.mmap(-1, 4096)
    except OSError as error:
        raise OSError(error.errno, "is not an NVMe namespace", os.readlink(f"/proc/self/fd/{fd}")) from error
    _issue(fd, _ADMIN, _IDENTIFY, nsid, page, 4096, 0)
    return nsid, *parse_namespace(page[:])


def parse_namespace(page: bytes) -> tuple[int, int]:
    """Number of LBAs and bytes per LBA of an Identify Namespace page (NVM Command Set Specification 1.0, figure 97)."""
    (lbas,) = struct.unpack_from("<Q", page)
    form = page[26] & 0xF
    return lbas, 1 << page[128 + 4 * form + 2]


def transfer_bytes(mdts: int) -> int:
    """Maximum data of one command by Identify's MDTS, bytes."""
    return _MPS_BYTES << mdts if mdts else _NO_MDTS_BYTES


def max_transfer_bytes(mdts: int, lba_bytes: int) -> int:
    """Maximum data of one command by MDTS and by its LBA count field, bytes."""
    return min(transfer_bytes(mdts) // lba_bytes, _MOST_LBAS) * lba_bytes


class NvmeTarget:
    """A namespace through its character device (/dev/ng0n1), accessed with read, write and deallocate commands.

    The namespace's block device is opened exclusively, so that it cannot be mounted; raises OSError (EBUSY) if it is.
    """

    uses_sqe128 = True

    def __init__(self, path: Path, size_bytes: int | None) -> None:
        """`size_bytes` is the part to use, None for all; raises OSError if the namespace is smaller."""
        self.name, self._block_fd = str(path), _open_exclusively(path)
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._nsid, lbas, self.block_bytes = identify_namespace(self._fd)
            self.max_bytes = max_transfer_bytes(identify_open_controller(self._fd)["mdts"], self.block_bytes)
            self.size_bytes = clamp_size(self.name, lbas * self.block_bytes, size_bytes)
        except OSError:
            self.close()
            raise

    def _command(self, request: IoRequest) -> bytes:
        lba, size = request.offset // self.block_bytes, request.buffer.nbytes
        opcode = READ if request.op == "read" else WRITE
        lbas = size // self.block_bytes - 1
        return pack_command(opcode, self._nsid, address(request.buffer), size, lba & 0xFFFFFFFF, lba >> 32, lbas)

    def prepare(self, ring: Ring, number: int, request: IoRequest, fixed: int | None) -> None:
        ring.command(self._fd, URING_IO, self._command(request), fixed, number)

    def move(self, request: IoRequest) -> int:
        return execute_command(self._fd, self._command(request))

    def outcome(self, request: IoRequest, result: int) -> IoCompletion:
        if not result:
            return IoCompletion(request, None)
        what = os.strerror(-result) if result < 0 else f"NVMe status {result:#05x}"
        where = f"{request.op} of {request.buffer.nbytes} bytes at {request.offset}"
        return IoCompletion(request, OSError(-result if result < 0 else errno.EIO, f"{what}, {where}", self.name))

    def discard(self, offset: int, size: int) -> None:
        blocks, most = size // self.block_bytes, 0xFFFFFFFF
        for first in range(0, blocks, most):
            page = mmap.mmap(-1, 4096)
            struct.pack_into("<IIQ", page, 0, 0, min(most, blocks - first), offset // self.block_bytes + first)
            io_command(self._fd, _MANAGE, self._nsid, page, 4096, 0, _DEALLOCATE)

    def sync(self) -> None:
        io_command(self._fd, _FLUSH, self._nsid, None, 0)

    def close(self) -> None:
        for fd in (self._fd, self._block_fd):
            if fd is not None:
                os.close(fd)


def _open_exclusively(path: Path) -> int | None:
    """Open the block device of a character device exclusively; None if there is no such device."""
    block = path.with_name(path.name.replace("ng", "nvme", 1))
    return os.open(block, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC) if block.is_block_device() else None
