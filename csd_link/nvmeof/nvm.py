"""NVM command set over a range of bytes (NVMe NVM Command Set Specification 1.0)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Protocol

from csd_link.nvmeof.commands import Answer, Code, CommandError, Csi, Sqe, words
from csd_link.nvmeof.pdu import Buffer
from csd_link.nvmeof.subsystem import effects_of

LBA_BYTES = 4096
_SHIFT = LBA_BYTES.bit_length() - 1
_RANGE = struct.Struct("<IIQ")  # attributes, blocks, first block
_DEALLOCATE = 1 << 2
_FORCE_UNIT_ACCESS = 1 << 30
_VERIFY_BYTES = 1 << 20  # read at once, so that other commands can be executed in between


class Nvm(IntEnum):
    """Opcodes."""

    FLUSH = 0x00
    WRITE = 0x01
    READ = 0x02
    COMPARE = 0x05
    WRITE_ZEROES = 0x08
    DATASET_MANAGEMENT = 0x09
    VERIFY = 0x0C


class Blocks(Protocol):
    """A range of bytes; methods raise CommandError."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def used_bytes(self) -> int:
        """Bytes of written, not discarded blocks."""
        ...

    @property
    def page_bytes(self) -> int:
        """Preferred size and alignment of writes."""
        ...

    def read(self, offset: int, size: int) -> bytes: ...

    def write(self, offset: int, data: Buffer) -> None: ...

    def discard(self, offset: int, size: int) -> None:
        """Discard bytes, which then read as zeros."""
        ...

    def flush(self) -> None: ...


class NvmNamespace:
    """A namespace with 4 KiB blocks."""

    csi: int = Csi.NVM
    effects: Mapping[int, int] = effects_of(Nvm, (Nvm.WRITE, Nvm.WRITE_ZEROES, Nvm.DATASET_MANAGEMENT))

    def __init__(self, blocks: Blocks, uuid: bytes) -> None:
        self._blocks, self.uuid = blocks, uuid
        self._lbas = blocks.size_bytes // LBA_BYTES

    def identify(self, host: str) -> bytes:
        page = bytearray(4096)
        used = min(self._lbas, -(-self._blocks.used_bytes // LBA_BYTES))
        struct.pack_into("<QQQ", page, 0, self._lbas, self._lbas, used)
        page[30] = 1 << 0  # NMIC: several controllers may attach it
        page[24] = 1 << 0 | 1 << 4  # NSFEAT: NUSE may be below NCAP; NPWG and following fields are valid
        page[33] = 1 << 0 | 1 << 3  # DLFEAT: deallocated blocks read as zeros, Write Zeroes may deallocate
        unit = max(1, self._blocks.page_bytes // LBA_BYTES) - 1
        struct.pack_into("<5H", page, 64, unit, unit, unit, unit, unit)  # NPWG, NPWA, NPDG, NPDA, NOWS
        page[104:120] = self.uuid  # NGUID
        page[130] = _SHIFT  # LBADS of format 0
        return bytes(page)

    def host_left(self, host: str) -> None:
        """It keeps nothing of a host."""

    def data_bytes(self, sqe: Sqe) -> int:
        if sqe.opcode in (Nvm.READ, Nvm.WRITE, Nvm.COMPARE):
            return (sqe.cdw12 & 0xFFFF) + 1 << _SHIFT
        if sqe.opcode == Nvm.DATASET_MANAGEMENT:
            return ((sqe.cdw10 & 0xFF) + 1) * _RANGE.size
        return 0

    def execute(self, sqe: Sqe, data: Buffer, host: str) -> Answer:
        if sqe.opcode == Nvm.FLUSH:
            self._blocks.flush()
            return Answer()
        if sqe.opcode == Nvm.DATASET_MANAGEMENT:
            return self._manage(sqe, data)
        offset, size = self._range(words(sqe.cdw10, sqe.cdw11), (sqe.cdw12 & 0xFFFF) + 1)
        match sqe.opcode:
            case Nvm.READ:
                return Answer((self._blocks.read(offset, size),))
            case Nvm.WRITE:
                self._blocks.write(offset, data)
            case Nvm.COMPARE:
                if self._blocks.read(offset, size) != data:
                    raise CommandError(Code.COMPARE_FAILURE)
            case Nvm.WRITE_ZEROES:
                self._blocks.discard(offset, size)
            case Nvm.VERIFY:
                for at in range(offset, offset + size, _VERIFY_BYTES):
                    self._blocks.read(at, min(_VERIFY_BYTES, offset + size - at))
        if sqe.cdw12 & _FORCE_UNIT_ACCESS and sqe.opcode in (Nvm.WRITE, Nvm.WRITE_ZEROES):
            self._blocks.flush()
        return Answer()

    def _manage(self, sqe: Sqe, data: Buffer) -> Answer:
        """Deallocate ranges, all or none; other attributes are hints and are ignored."""
        ranges = [self._range(first, count) for _, count, first in _RANGE.iter_unpack(data) if count]
        if sqe.cdw11 & _DEALLOCATE:
            for offset, size in ranges:
                self._blocks.discard(offset, size)
        return Answer()

    def _range(self, first: int, count: int) -> tuple[int, int]:
        """Byte offset and size."""
        if first + count > self._lbas:
            raise CommandError(Code.LBA_RANGE)
        return first << _SHIFT, count << _SHIFT
