"""CRC-32C (Castagnoli), the digest of iSCSI and NVMe/TCP.

Short inputs are processed byte by byte. Long inputs are cut into lanes that numpy processes in parallel; the CRC is
linear, so the lanes are then combined pairwise, each step shifting the left one past the bytes of the right one.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from csd_spec.arrays import U32

Bytes = bytes | bytearray | memoryview

_POLYNOMIAL = 0x82F63B78  # reflected; RFC 3720, appendix B.4
_ONES = 0xFFFFFFFF
_SHORT_BYTES = 512
_LANE_BYTES = 256


def _byte_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _byte_table()
_NP_TABLE = np.array(_TABLE, np.uint32)


def crc32c(data: Bytes) -> int:
    """CRC-32C of bytes, including initial value and final complement (0xE3069283 for b"123456789")."""
    size = len(data)
    if size <= _SHORT_BYTES:
        return _crc_bytes(_ONES, data) ^ _ONES
    lanes = size // _LANE_BYTES
    head = size - lanes * _LANE_BYTES
    view = memoryview(data)
    first = _crc_bytes(_ONES, view[:head])
    crcs = _lanes(np.frombuffer(view[head:], np.uint8).reshape(lanes, _LANE_BYTES), first)
    return _combine(crcs) ^ _ONES


def _crc_bytes(crc: int, data: Bytes) -> int:
    for byte in bytes(data):
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc


def _lanes(rows: np.ndarray[tuple[int, int], np.dtype[np.uint8]], first: int) -> U32:
    """CRC of each row (lanes, bytes) of uint8; the first starts from `first`, the others from 0."""
    crcs = np.zeros(len(rows), np.uint32)
    crcs[0] = first
    for column in np.ascontiguousarray(rows.T):
        crcs = crcs >> np.uint32(8) ^ _NP_TABLE[(crcs ^ column) & np.uint32(0xFF)]
    return crcs


def _combine(crcs: U32) -> int:
    """CRC of consecutive lanes. Leading zeros do not change a CRC that starts from 0."""
    if len(crcs) & len(crcs) - 1:
        crcs = np.concatenate([np.zeros((1 << len(crcs).bit_length()) - len(crcs), np.uint32), crcs])
    level = 0
    while len(crcs) > 1:
        crcs = _shift_zeros(crcs[::2], level) ^ crcs[1::2]
        level += 1
    return int(crcs[0])


def _shift_zeros(crcs: U32, level: int) -> U32:
    """Shift each CRC past the zero bytes of 2^level lanes."""
    tables = _shift_tables(level)
    found: U32 = tables[0][crcs & np.uint32(0xFF)]
    for number in (1, 2, 3):
        found = found ^ tables[number][crcs >> np.uint32(8 * number) & np.uint32(0xFF)]
    return found


@lru_cache(maxsize=32)
def _shift_tables(level: int) -> tuple[U32, ...]:
    """Four tables of 256 entries, one per byte of a CRC, that shift it past the zeros of a level."""
    values = [np.arange(256, dtype=np.uint32) << np.uint32(8 * number) for number in range(4)]
    if level:
        return tuple(_shift_zeros(_shift_zeros(value, level - 1), level - 1) for value in values)
    zeros = np.zeros(_LANE_BYTES, np.uint8)
    for byte in zeros:
        values = [value >> np.uint32(8) ^ _NP_TABLE[(value ^ byte) & np.uint32(0xFF)] for value in values]
    return tuple(values)
