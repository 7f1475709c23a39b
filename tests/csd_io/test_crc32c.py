"""CRC-32C against the vectors of RFC 3720, and against a bitwise computation."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csd_io.crc32c import crc32c
from tests.properties import examples


def bit_by_bit(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_vectors_of_rfc_3720(data, crc):
    assert crc32c(data) == crc


@settings(max_examples=examples(60))
@given(st.integers(0, 5000), st.randoms(use_true_random=False))
def test_any_length_has_the_crc_of_its_bits(size, random):
    data = random.randbytes(size)
    assert crc32c(data) == crc32c(memoryview(bytearray(data))) == bit_by_bit(data)
