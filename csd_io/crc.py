"""Checksums as zlib has them, at memory's speed, and CRC-32 as an error-correcting code: up to 11 KiB, every single
flipped bit leaves a difference of its own."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from zlib_ng.zlib_ng import adler32, crc32

from csd_spec.arrays import U32

__all__ = ["adler32", "corrected", "crc32"]

Bytes = bytes | bytearray | memoryview


@lru_cache(maxsize=16)
def _differences(size: int) -> U32:
    """What each flipped bit of `size` bytes does to their CRC, (8 * size,), in the order of bytes and bits."""
    zero = crc32(b"\0")
    table = np.array([crc32(bytes([value])) ^ zero for value in range(256)], np.uint32)
    found = np.empty((size, 8), np.uint32)
    last = table[1 << np.arange(8)]
    for byte in range(size - 1, -1, -1):
        found[byte] = last
        last = table[last & 0xFF] ^ last >> 8
    return found.reshape(-1)


def corrected(data: Bytes, crc: int) -> tuple[bytes, int] | None:
    """Data and CRC-32 that match, one flipped bit of either undone; None where that does not explain the difference."""
    difference = crc32(data) ^ crc
    if not difference & (difference - 1):  # none, or a bit of the CRC itself
        return bytes(data), crc ^ difference
    where = np.flatnonzero(_differences(len(data)) == difference)
    if not where.size:
        return None
    byte, bit = divmod(int(where[0]), 8)
    fixed = bytearray(data)
    fixed[byte] ^= 1 << bit
    return bytes(fixed), crc
