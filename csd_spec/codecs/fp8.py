"""FP8: E4M3 (OCP 8-bit floating point specification, revision 1.0) with a power-of-two scale per vector.

A vector of t values is t + 1 bytes: an exponent byte b, then t codes. A value is its code x 2^(b - 135): b is the
exponent field of FP32's 2^(b - 127), and a code, decoded as FP16 with one more exponent bit, is 2^-8 of its value.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from csd_spec.arrays import U8, U16
from csd_spec.codecs.codec import Codec

# Exponent fields of the largest value: every stored value is a normal, finite BF16
MIN_EXPONENT, MAX_EXPONENT = 17, 253
MAX_CODE = 0x7E  # 448; the next code is NaN
_CODES = np.arange(256, dtype=np.uint16)
_FRACTIONS = ((_CODES & 0x80) << 8 | (_CODES & 0x7F) << 7).view(np.float16).astype(np.float32)  # 2^-8 of each code


def row_bytes(values: int) -> int:
    """Bytes of a vector."""
    return values + 1


def encode(values: U16) -> U8:
    """Encode finite BF16 values (..., t) to vectors (..., t + 1), rounded to nearest, ties to even.

    The largest value of a vector, rounded to 4 bits, gets a code in [128, 256): normal codes reach down to 2^-14 of
    it, and smaller ones have a quantum of 2^-17 of it. So encoding decoded values gives the same codes. A largest value
    below 2^-110 is treated as 2^-110; values above 1.75 x 2^127 are clamped to it.
    """
    bits = values.astype(np.int64)
    largest = (bits & 0x7FFF).max(axis=-1, keepdims=True)
    top = (_shifted(largest, 4) >> 3).clip(MIN_EXPONENT, MAX_EXPONENT)
    exponent = bits >> 7 & 0xFF
    field = exponent - top + 14  # exponent field of the code
    normal, by = np.maximum(field, 1), 4 + np.maximum(1 - field, 0)
    significand = bits & 0x7F | np.where(exponent, 0x80, 0)
    code = (normal - 1 << 3) + np.where(by < 10, _shifted(significand, np.minimum(by, 10)), 0)
    codes = bits >> 8 & 0x80 | np.minimum(code, MAX_CODE)
    return np.concatenate([top + 1, codes], axis=-1).astype(np.uint8)


def _shifted(bits: Any, by: Any) -> Any:
    """bits / 2^by, rounded to nearest, ties to even."""
    return (bits + (1 << by - 1) - 1 + (bits >> by & 1)) >> by


def decode(vectors: U8, values: int) -> U16:
    """Decode vectors (..., t + 1) to values (..., t), as BF16 bit patterns; exact."""
    scales = (vectors[..., :1].astype(np.uint32) << np.uint32(23)).view(np.float32)
    wide = _FRACTIONS[vectors[..., 1 : values + 1]] * scales
    bits: U16 = (wide.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return bits


FP8 = Codec("fp8", "bf16", row_bytes, encode, decode, tag=3)
