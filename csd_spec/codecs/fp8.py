"""FP8: E4M3 (OCP 8-bit floating point specification, revision 1.0) with a power-of-two scale per vector.

A vector of t values is t + 1 bytes: an exponent b, then t codes. A value is its code x 2^(b - 135): b is the exponent
field of FP32's 2^(b - 127), and a code read as FP16 with one more bit of exponent is 2^-8 of itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from csd_spec.arrays import U8, U16
from csd_spec.codecs.codec import Codec

LEAST, MOST = 17, 253  # exponent fields of the largest value: all that is stored is a normal BF16 below infinity
MAX_CODE = 0x7E  # 448; one more is NaN
_CODES = np.arange(256, dtype=np.uint16)
_FRACTIONS = ((_CODES & 0x80) << 8 | (_CODES & 0x7F) << 7).view(np.float16).astype(np.float32)  # 2^-8 of each code


def row_bytes(values: int) -> int:
    """Bytes of a vector."""
    return values + 1


def encode(values: U16) -> U8:
    """Vectors (..., t + 1) of finite BF16 values (..., t), rounded to the nearest, ties to even.

    The largest value of a vector, rounded to 4 bits, gets a code in [128, 256): normal codes reach 2^-14 of that, and
    those below have a quantum of 2^-17 of it. So decoded values are encoded as they were. Largest values below 2^-110
    count as that; values above 1.75 x 2^127 become that.
    """
    bits = values.astype(np.int64)
    largest = (bits & 0x7FFF).max(axis=-1, keepdims=True)
    top = (_shifted(largest, 4) >> 3).clip(LEAST, MOST)
    exponent = bits >> 7 & 0xFF
    field = exponent - top + 14  # of a code
    normal, by = np.maximum(field, 1), 4 + np.maximum(1 - field, 0)
    significand = bits & 0x7F | np.where(exponent, 0x80, 0)
    code = (normal - 1 << 3) + np.where(by < 10, _shifted(significand, np.minimum(by, 10)), 0)
    codes = bits >> 8 & 0x80 | np.minimum(code, MAX_CODE)
    return np.concatenate([top + 1, codes], axis=-1).astype(np.uint8)


def _shifted(bits: Any, by: Any) -> Any:
    """bits / 2^by, rounded to the nearest, ties to even."""
    return (bits + (1 << by - 1) - 1 + (bits >> by & 1)) >> by


def decode(vectors: U8, values: int) -> U16:
    """Values (..., t) of vectors (..., t + 1), as BF16 bit patterns; exact."""
    scales = (vectors[..., :1].astype(np.uint32) << np.uint32(23)).view(np.float32)
    wide = _FRACTIONS[vectors[..., 1 : values + 1]] * scales
    bits: U16 = (wide.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return bits


FP8 = Codec("fp8", "bf16", row_bytes, encode, decode, tag=3)
