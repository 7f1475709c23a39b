"""NVMe commands by the Linux driver's passthrough: Identify, and blocks of a namespace past the block layer."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
from pathlib import Path
from typing import Any

from csd_io.queue import Ended, Request, address, usable
from csd_io.ring import Ring

READ, WRITE = 0x02, 0x01
_FLUSH, _MANAGE = 0x00, 0x09  # Dataset Management
_DEALLOCATE = 4
_IDENTIFY = 0x06
_MPS_BYTES = 4096  # the unit of MDTS; controllers with a larger smallest page are not known to Linux on x86
_NO_MDTS_BYTES = 1 << 20  # of a controller without a limit
_MOST_LBAS = 1 << 16  # of a read or write

# struct nvme_passthru_cmd, linux/nvme_ioctl.h: opcode, flags, namespace, dwords 2 and 3, metadata, address, bytes of
# both, dwords 10 to 15, timeout in ms, result
_COMMAND = struct.Struct("<BBHIIIQQIIIIIIIIII")
_ADMIN, _IO = 0xC0484E41, 0xC0484E43
NAMESPACE_ID, URING_IO = 0x4E40, 0xC0484E80
_TIMEOUT_MS = 5000


def packed(opcode: int, nsid: int, where: int, size: int, *dwords: int) -> bytes:
    """A command with one buffer and dwords from 10 on."""
    values = (*dwords, *(0,) * (6 - len(dwords)))
    return _COMMAND.pack(opcode, 0, 0, nsid, 0, 0, 0, where, 0, size, *values, _TIMEOUT_MS, 0)


def io_command(fd: int, opcode: int, nsid: int, buffer: mmap.mmap | None, size: int, *dwords: int) -> None:
    """Issue an I/O command and wait for it; raises OSError with the NVMe status."""
    _issue(fd, _IO, opcode, nsid, buffer, size, *dwords)


def _issue(fd: int, kind: int, opcode: int, nsid: int, buffer: mmap.mmap | None, size: int, *dwords: int) -> None:
    where = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if buffer else 0
    status = fcntl.ioctl(fd, kind, bytearray(packed(opcode, nsid, where, size, *dwords)))
    if status:
        raise OSError(errno.EIO, f"NVMe command {opcode:#04x}: status {status:#05x}")


def identify_controller(path: Path) -> dict[str, Any]:
    """What the controller behind a device file says of itself, with nvme-cli's key names (`nvme id-ctrl`)."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return identify_open_controller(fd)
    finally:
        os.close(fd)


def wait_for(fd: int, command: bytes) -> int:
    """Carry out a packed I/O command; returns its NVMe status."""
    return int(fcntl.ioctl(fd, _IO, bytearray(command)))


def identify_open_controller(fd: int) -> dict[str, Any]:
    """Of the controller behind an open device file; see `identify_controller`."""
    page = mmap.mmap(-1, 4096)
    _issue(fd, _ADMIN, _IDENTIFY, 0, page, 4096, 1)
    return parse_controller(page[:])


def parse_controller(page: bytes) -> dict[str, Any]:
    """Fields of an Identify Controller page (NVMe Base Specification 2.0, figure 275)."""
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
    """Number of an open namespace, its LBAs and the bytes of each."""
    try:
        nsid, page = fcntl.ioctl(fd, NAMESPACE_ID), mmap.mmap(-1, 4096)
    except OSError as error:
        raise OSError(error.errno, "is no NVMe namespace", os.readlink(f"/proc/self/fd/{fd}")) from error
    _issue(fd, _ADMIN, _IDENTIFY, nsid, page, 4096, 0)
    return nsid, *parse_namespace(page[:])


def parse_namespace(page: bytes) -> tuple[int, int]:
    """LBAs, and bytes of each, of an Identify Namespace page (NVM Command Set Specification 1.0, figure 97)."""
    (lbas,) = struct.unpack_from("<Q", page)
    form = page[26] & 0xF
    return lbas, 1 << page[128 + 4 * form + 2]


def transfer_bytes(mdts: int) -> int:
    """Most data of one command, as Identify's MDTS says."""
    return _MPS_BYTES << mdts if mdts else _NO_MDTS_BYTES


def most_bytes(mdts: int, lba_bytes: int) -> int:
    """Of one command, as Identify's MDTS says, and as a command's count of LBAs can say."""
    return min(transfer_bytes(mdts) // lba_bytes, _MOST_LBAS) * lba_bytes


class NvmeTarget:
    """A namespace by its character device, as /dev/ng0n1: reads, writes and deallocation are commands of ours.

    The block device of the namespace is held meanwhile, so that nobody mounts it; raises OSError (EBUSY) where somebody
    has.
    """

    wide = True

    def __init__(self, path: Path, size_bytes: int | None) -> None:
        """size_bytes: to use of it; None is all. Raises OSError where it is smaller."""
        self.name, self._held = str(path), _hold(path)
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._nsid, lbas, self.block_bytes = identify_namespace(self._fd)
            self.max_bytes = most_bytes(identify_open_controller(self._fd)["mdts"], self.block_bytes)
            self.size_bytes = usable(self.name, lbas * self.block_bytes, size_bytes)
        except OSError:
            self.close()
            raise

    def _command(self, request: Request) -> bytes:
        lba, size = request.offset // self.block_bytes, request.buffer.nbytes
        opcode = READ if request.op == "read" else WRITE
        lbas = size // self.block_bytes - 1
        return packed(opcode, self._nsid, address(request.buffer), size, lba & 0xFFFFFFFF, lba >> 32, lbas)

    def prepare(self, ring: Ring, number: int, request: Request, fixed: int | None) -> None:
        ring.command(self._fd, URING_IO, self._command(request), fixed, number)

    def move(self, request: Request) -> int:
        return wait_for(self._fd, self._command(request))

    def outcome(self, request: Request, result: int) -> Ended:
        if not result:
            return Ended(request, None)
        what = os.strerror(-result) if result < 0 else f"NVMe status {result:#05x}"
        where = f"{request.op} of {request.buffer.nbytes} bytes at {request.offset}"
        return Ended(request, OSError(-result if result < 0 else errno.EIO, f"{what}, {where}", self.name))

    def discard(self, offset: int, size: int) -> None:
        blocks, most = size // self.block_bytes, 0xFFFFFFFF
        for first in range(0, blocks, most):
            page = mmap.mmap(-1, 4096)
            struct.pack_into("<IIQ", page, 0, 0, min(most, blocks - first), offset // self.block_bytes + first)
            io_command(self._fd, _MANAGE, self._nsid, page, 4096, 0, _DEALLOCATE)

    def sync(self) -> None:
        io_command(self._fd, _FLUSH, self._nsid, None, 0)

    def close(self) -> None:
        for fd in (self._fd, self._held):
            if fd is not None:
                os.close(fd)


def _hold(path: Path) -> int | None:
    """The block device of a character device, so that nobody else has it; None where there is none."""
    block = path.with_name(path.name.replace("ng", "nvme", 1))
    return os.open(block, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC) if block.is_block_device() else None
