"""zlib checksums at memory speed, and CRC-32 as an error-correcting code: up to 11 KiB, each flipped bit has a unique
syndrome."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from zlib_ng.zlib_ng import adler32, crc32

from csd_spec.arrays import U32

__all__ = ["adler32", "correct_single_bit", "crc32"]

Bytes = bytes | bytearray | memoryview


@lru_cache(maxsize=16)
def _differences(size: int) -> U32:
    """Change of the CRC for each flipped bit of `size` bytes, (8 * size,), in the order of bytes and bits."""
    zero = crc32(b"\0")
    table = np.array([crc32(bytes([value])) ^ zero for value in range(256)], np.uint32)
    differences = np.empty((size, 8), np.uint32)
    last = table[1 << np.arange(8)]
    for byte in range(size - 1, -1, -1):
        differences[byte] = last
        last = table[last & 0xFF] ^ last >> 8
    return differences.reshape(-1)


def correct_single_bit(data: Bytes, crc: int) -> tuple[bytes, int] | None:
    """Return data and CRC-32 that match after correcting one flipped bit of either; None if more bits differ."""
    difference = crc32(data) ^ crc
    if not difference & (difference - 1):  # no error, or one bit of the CRC itself
        return bytes(data), crc ^ difference
    where = np.flatnonzero(_differences(len(data)) == difference)
    if not where.size:
        return None
    byte, bit = divmod(int(where[0]), 8)
    fixed = bytearray(data)
    fixed[byte] ^= 1 << bit
    return bytes(fixed), crc
