"""INT8 keys and values: the loops of refined pages (`csd_spec.progressive`), and 16-bit values as FP32.

Rows are FP16 or BF16: `bf16` is True or None in compiled loops, so that each has its own specialization.
"""

from __future__ import annotations

import math

import numpy as np

from csd_io.compiled import njit
from csd_spec.arrays import F32, U8, U16
from csd_spec.progressive import EXPONENTS, EXPONENTS_BF16, MAX_CODE, Progressive

MAX_HALF, MAX_BRAIN = np.float32(np.finfo(np.float16).max), np.float32(MAX_CODE * 2.0 ** EXPONENTS_BF16[1])
_FURTHER = np.float32(2.0**112)


@njit(cache=True, nogil=True)
def finite(bits, bf16):  # type: ignore[no-untyped-def]
    """FP32 value of 16 bits; NaN becomes 0, infinity (and BF16 beyond about 2^127) the largest finite value.

    With the clamp, no range overflows. FP16's exponent and fraction are moved to FP32's position, which differs by
    112 in the exponent and by 13 bits; the product also makes subnormals right.
    """
    size = np.uint32(bits) & np.uint32(0x7FFF)
    if bf16 is not None:
        value = min(np.uint32(size << np.uint32(16)).view(np.float32), MAX_BRAIN)
        value = value if size <= np.uint32(0x7F80) else np.float32(0)
    else:
        value = min(np.uint32(size << np.uint32(13)).view(np.float32) * _FURTHER, MAX_HALF)
        value = value if size <= np.uint32(0x7C00) else np.float32(0)
    return -value if bits & np.uint16(0x8000) else value


def to_fp32(bits: U16, bf16: bool) -> F32:
    """FP32 values of 16-bit patterns."""
    if not bf16:
        return bits.view(np.float16).astype(np.float32)
    wide: F32 = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return wide


def to_16_bits(values: F32, bf16: bool) -> U16:
    """Round to 16 bits: FP16 to nearest, BF16 away from 0, so that a scale always covers a channel's maximum."""
    if not bf16:
        return np.minimum(values, MAX_HALF).astype(np.float16).view(np.uint16)
    bits: U16 = (values.view(np.uint32) + np.uint32(0xFFFF) >> np.uint32(16)).astype(np.uint16)
    return bits


@njit(cache=True, nogil=True)
def _exponent(most, bf16):  # type: ignore[no-untyped-def]
    """Smallest e with most <= MAX_CODE x 2^e, within the allowed exponents."""
    lowest, highest = EXPONENTS_BF16 if bf16 is not None else EXPONENTS
    fraction, exponent = math.frexp(most / np.float32(MAX_CODE))
    exponent -= fraction == 0.5
    return min(max(exponent if most > 0 else lowest, lowest), highest)


@njit(cache=True, nogil=True)
def _encode(values, exponent, codes):  # type: ignore[no-untyped-def]
    """INT8 codes of FP32 values."""
    scale = np.float32(math.ldexp(1.0, -exponent))
    for i in range(values.size):
        codes[i] = np.int8(min(max(np.rint(values[i] * scale), np.float32(-MAX_CODE)), np.float32(MAX_CODE)))


@njit(cache=True, nogil=True)
def _refine(rows, bf16, d, header, pages):  # type: ignore[no-untyped-def]
    """Write refined pages of rows (pages, n, parts x d): exponents of K's channels and of V's tokens, then codes."""
    (count, n, width), column, row = rows.shape, np.empty(rows.shape[1], np.float32), np.empty(d, np.float32)
    for page in range(count):
        codes = pages[page, header : header + n * width].reshape(-1, d)
        for channel in range(d):
            for t in range(n):
                column[t] = finite(rows[page, t, channel], bf16)
            pages[page, channel] = _exponent(np.abs(column).max(), bf16)
            _encode(column, pages[page, channel], codes[:n, channel])
        for t in range(n if width > d else 0):
            for channel in range(d):
                row[channel] = finite(rows[page, t, d + channel], bf16)
            pages[page, d + t] = _exponent(np.abs(row).max(), bf16)
            _encode(row, pages[page, d + t], codes[n + t])


def refine(pages: U8, form: Progressive, rows: U16) -> None:
    """Write refined pages (pages, page_bytes) of rows (pages, n, parts x d): K, then V."""
    rows = np.ascontiguousarray(rows).view(np.uint16)
    _refine(rows, form.bf16 or None, form.head_dim, form.refined_header, pages.view(np.int8))


def refined(pages: U8, form: Progressive) -> U16:
    """Dequantize refined pages (pages, page_bytes) to rows (pages, n, parts x d)."""
    signed, n, d = np.ascontiguousarray(pages).view(np.int8), form.n, form.head_dim
    codes = signed[:, form.refined_header : form.refined_bytes].reshape(-1, form.parts, n, d)
    values = codes.astype(np.float32)
    values[:, 0] *= np.exp2(signed[:, None, :d].astype(np.float32))
    values[:, 1:] *= np.exp2(signed[:, None, d : d + n, None].astype(np.float32))
    rows = to_16_bits(values, form.bf16)
    return np.ascontiguousarray(rows.transpose(0, 2, 1, 3)).reshape(-1, n, form.parts * d)
