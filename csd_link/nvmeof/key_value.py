"""Key Value command set over a store of values by key (NVMe Key Value Command Set Specification 1.0d)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Protocol

from csd_link.nvmeof.commands import Answer, Code, CommandError, Csi, Sqe
from csd_link.nvmeof.pdu import Buffer
from csd_link.nvmeof.subsystem import effects_of

MAX_KEY_BYTES = 16
_KEY = struct.Struct("<4I")
_MUST_EXIST, _MUST_BE_NEW = 1 << 8, 1 << 9  # store options; data is never compressed (bit 10)
_COUNT_BYTES = _ALIGN = 4
_LENGTH = struct.Struct("<H")


class KeyValue(IntEnum):
    """Opcodes."""

    FLUSH = 0x00
    STORE = 0x01
    RETRIEVE = 0x02
    LIST = 0x06
    DELETE = 0x10
    EXIST = 0x14


class ValueNamespace(Protocol):
    """Values of one tenant by key; methods raise CommandError."""

    @property
    def size_bytes(self) -> int:
        """Capacity for keys and values, bytes."""
        ...

    @property
    def used_bytes(self) -> int:
        """Capacity used by its values, bytes."""
        ...

    @property
    def granularity_bytes(self) -> int:
        """Allocation unit of values, bytes."""
        ...

    @property
    def max_value_bytes(self) -> int: ...

    @property
    def max_keys(self) -> int: ...

    def store(self, key: bytes, value: Buffer, must_exist: bool, must_be_new: bool) -> None:
        """Store a value atomically."""
        ...

    def retrieve(self, key: bytes, size_bytes: int) -> tuple[bytes, int]:
        """Return the first `size_bytes` of a value, and its size in bytes."""
        ...

    def exist(self, key: bytes) -> int:
        """Return the size of a value, bytes."""
        ...

    def delete(self, key: bytes) -> None: ...

    def keys(self, first: bytes, count: int) -> list[bytes]:
        """Return at most `count` keys >= `first`, in byte order."""
        ...

    def flush(self) -> None: ...


class KeyValueNamespace:
    """A namespace with separate keys and values for each tenant."""

    csi: int = Csi.KEY_VALUE
    effects: Mapping[int, int] = effects_of(KeyValue, (KeyValue.STORE, KeyValue.DELETE))

    def __init__(self, serve: Callable[[str], ValueNamespace], uuid: bytes) -> None:
        """`serve` returns the values of a host's tenant, by the host's NQN."""
        self._serve, self.uuid = serve, uuid

    def identify(self, host: str) -> bytes:
        """Figure 39, with one KV format (figure 40)."""
        values, page = self._serve(host), bytearray(4096)
        struct.pack_into("<QQQ", page, 0, values.size_bytes, 0, min(values.size_bytes, values.used_bytes))
        page[24] = 1 << 3  # NSFEAT: the NGUID is never reused
        page[26] = 1 << 0  # NMIC: several controllers may attach it
        struct.pack_into("<I", page, 32, values.granularity_bytes)  # NOVG
        page[48:64] = self.uuid  # NGUID
        struct.pack_into("<HxBIII", page, 72, MAX_KEY_BYTES, 0, values.max_value_bytes, values.max_keys, 0)
        return bytes(page)

    def host_left(self, host: str) -> None:
        """It keeps nothing of a host."""

    def data_bytes(self, sqe: Sqe) -> int:
        return sqe.cdw10 if sqe.opcode in (KeyValue.STORE, KeyValue.RETRIEVE, KeyValue.LIST) else 0

    def execute(self, sqe: Sqe, data: Buffer, host: str) -> Answer:
        values = self._serve(host)
        if sqe.opcode == KeyValue.FLUSH:
            values.flush()
            return Answer()
        key = _key_of(sqe)
        if sqe.opcode == KeyValue.LIST:
            return Answer((_listed(values, key, sqe.cdw10),))
        if not key:
            raise CommandError(Code.INVALID_KEY_SIZE)
        match sqe.opcode:
            case KeyValue.STORE:
                if len(data) > values.max_value_bytes:
                    raise CommandError(Code.INVALID_VALUE_SIZE)
                values.store(key, data, bool(sqe.cdw11 & _MUST_EXIST), bool(sqe.cdw11 & _MUST_BE_NEW))
                values.flush()  # hosts of this command set assume that a stored value is durable
            case KeyValue.RETRIEVE:
                value, size = values.retrieve(key, sqe.cdw10)
                return Answer((value,), size)
            case KeyValue.DELETE:
                values.delete(key)
                values.flush()
            case KeyValue.EXIST:
                return Answer(result=values.exist(key))
        return Answer()


def _key_of(sqe: Sqe) -> bytes:
    """The key of a command; empty if its length is 0."""
    length = sqe.cdw11 & 0xFF
    if length > MAX_KEY_BYTES:
        raise CommandError(Code.INVALID_FIELD)
    return _KEY.pack(sqe.cdw2, sqe.cdw3, sqe.cdw14, sqe.cdw15)[:length]


def _listed(values: ValueNamespace, first: bytes, size_bytes: int) -> bytes:
    """List keys >= `first` that fit the host's buffer completely (figures 15 and 16)."""
    if size_bytes < _COUNT_BYTES:
        raise CommandError(Code.INVALID_FIELD)
    entries, left = list[bytes](), size_bytes - _COUNT_BYTES
    for key in values.keys(first, left // _ALIGN):
        size = -(-(_LENGTH.size + len(key)) // _ALIGN) * _ALIGN
        if size > left:
            break
        entries.append((_LENGTH.pack(len(key)) + key).ljust(size, b"\0"))
        left -= size
    return len(entries).to_bytes(_COUNT_BYTES, "little") + b"".join(entries)
