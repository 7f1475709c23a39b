"""The Linux NVMe driver's passthrough: Identify, and blocks by commands instead of reads and writes of a file."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
from pathlib import Path
from typing import Any

from csd_link.window import BLOCK_BYTES

# struct nvme_passthru_cmd, linux/nvme_ioctl.h: opcode, flags, namespace, dwords 2 and 3, metadata, address, bytes of
# both, dwords 10 to 15, timeout in ms, result
_COMMAND = struct.Struct("<BBHIIIQQIIIIIIIIII")
_ADMIN, _IO = 0xC0484E41, 0xC0484E43
_ID = 0x4E40
_IDENTIFY, _READ, _WRITE = 0x06, 0x02, 0x01
_TIMEOUT_MS = 5000


def _passthrough(fd: int, kind: int, opcode: int, nsid: int, buffer: mmap.mmap, size: int, *dwords: int) -> None:
    """Issue a command with one buffer; raises OSError with the NVMe status."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    values = (*dwords, *(0,) * (6 - len(dwords)))
    command = _COMMAND.pack(opcode, 0, 0, nsid, 0, 0, 0, address, 0, size, *values, _TIMEOUT_MS, 0)
    status = fcntl.ioctl(fd, kind, bytearray(command))
    if status:
        raise OSError(f"NVMe command {opcode:#04x}: status {status:#05x}")


def identify_controller(path: Path) -> dict[str, Any]:
    """What the controller behind a device file says of itself, with nvme-cli's key names (`nvme id-ctrl`)."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        page = mmap.mmap(-1, 4096)
        _passthrough(fd, _ADMIN, _IDENTIFY, 0, page, 4096, 1)
        return parse_controller(page[:])
    finally:
        os.close(fd)


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


class PassthroughMedium:
    """Blocks of an NVMe namespace by read and write commands over its character device, as /dev/ng0n1."""

    def __init__(self, path: Path, offset_bytes: int = 0, max_bytes: int = 1 << 17) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._nsid = fcntl.ioctl(self._fd, _ID)
        page = mmap.mmap(-1, 4096)
        _passthrough(self._fd, _ADMIN, _IDENTIFY, self._nsid, page, 4096, 0)
        (size,) = struct.unpack_from("<Q", page)
        form = page[26] & 0xF
        self._lba_bytes = 1 << page[128 + 4 * form + 2]
        self._offset, self._max_bytes = offset_bytes, max_bytes
        self.blocks = (size * self._lba_bytes - offset_bytes) // BLOCK_BYTES

    def read(self, block: int, count: int = 1) -> bytearray:
        out = bytearray()
        for at, size in self._parts(block, count * BLOCK_BYTES):
            buffer = mmap.mmap(-1, size)
            self._move(_READ, at, buffer, size)
            out += buffer
        return out

    def write(self, block: int, data: bytes | bytearray | memoryview) -> None:
        view, done = memoryview(data), 0
        for at, size in self._parts(block, -(-len(view) // BLOCK_BYTES) * BLOCK_BYTES):
            buffer = mmap.mmap(-1, size)
            part = view[done : done + size]
            buffer[: len(part)] = part
            self._move(_WRITE, at, buffer, size)
            done += size

    def _move(self, opcode: int, at: int, buffer: mmap.mmap, size: int) -> None:
        lba, lbas = at // self._lba_bytes, size // self._lba_bytes
        _passthrough(self._fd, _IO, opcode, self._nsid, buffer, size, lba & 0xFFFFFFFF, lba >> 32, lbas - 1)

    def _parts(self, block: int, size: int) -> list[tuple[int, int]]:
        first = self._offset + block * BLOCK_BYTES
        return [(at, min(self._max_bytes, first + size - at)) for at in range(first, first + size, self._max_bytes)]

    def close(self) -> None:
        os.close(self._fd)
