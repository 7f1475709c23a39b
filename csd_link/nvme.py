"""Window access through NVMe commands instead of file reads and writes."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from csd_io.nvme import READ, WRITE, identify_namespace, io_command
from csd_link.window import BLOCK_BYTES


class PassthroughMedium:
    """Blocks of an NVMe namespace, accessed with read and write commands on its character device (/dev/ng0n1)."""

    def __init__(self, path: Path, offset_bytes: int = 0, max_bytes: int = 1 << 17) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._nsid, lbas, self._lba_bytes = identify_namespace(self._fd)
        self._offset, self._max_bytes = offset_bytes, max_bytes
        self.blocks = (lbas * self._lba_bytes - offset_bytes) // BLOCK_BYTES

    def read(self, block: int, count: int = 1) -> bytearray:
        out = bytearray()
        for at, size in self._parts(block, count * BLOCK_BYTES):
            buffer = mmap.mmap(-1, size)
            self._move(READ, at, buffer, size)
            out += buffer
        return out

    def write(self, block: int, data: bytes | bytearray | memoryview) -> None:
        view, done = memoryview(data), 0
        for at, size in self._parts(block, -(-len(view) // BLOCK_BYTES) * BLOCK_BYTES):
            buffer = mmap.mmap(-1, size)
            part = view[done : done + size]
            buffer[: len(part)] = part
            self._move(WRITE, at, buffer, size)
            done += size

    def _move(self, opcode: int, at: int, buffer: mmap.mmap, size: int) -> None:
        lba, lbas = at // self._lba_bytes, size // self._lba_bytes
        io_command(self._fd, opcode, self._nsid, buffer, size, lba & 0xFFFFFFFF, lba >> 32, lbas - 1)

    def _parts(self, block: int, size: int) -> list[tuple[int, int]]:
        first = self._offset + block * BLOCK_BYTES
        return [(at, min(self._max_bytes, first + size - at)) for at in range(first, first + size, self._max_bytes)]

    def close(self) -> None:
        os.close(self._fd)
