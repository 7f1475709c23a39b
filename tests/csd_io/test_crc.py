"""A CRC-32 locates a single flipped bit, and reports none if two bits are flipped."""

import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csd_io.crc import correct_single_bit


@given(st.binary(min_size=1, max_size=600), st.data())
def test_single_bit_error_is_corrected(data, draw):
    crc, bit = zlib.crc32(data), draw.draw(st.integers(0, 8 * len(data) + 31))
    whole = int.from_bytes(data, "little") | crc << 8 * len(data)
    flipped = (whole ^ 1 << bit).to_bytes(len(data) + 4, "little")
    assert correct_single_bit(flipped[:-4], int.from_bytes(flipped[-4:], "little")) == (data, crc)


@pytest.mark.parametrize("size", [28, 512, 4096])
def test_double_bit_error_is_not_corrected(size):
    data = random.Random(size).randbytes(size)
    for second in range(1, 8 * size, 97):
        flipped = bytearray(data)
        flipped[0] ^= 1
        flipped[second // 8] ^= 1 << second % 8
        assert correct_single_bit(flipped, zlib.crc32(data)) is None
