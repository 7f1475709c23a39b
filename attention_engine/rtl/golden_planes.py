"""Bit-exact models of the units for pages of few-bit K, on integers.

`int8_unpack`, `fx_product` and `plane_scores` have the RTL module of their name beside them. A coefficient, a sum of
coefficients and a product of q and a least value are integers with `COEF_FRAC` bits behind the point, in log2 units; a
score x has `LOGIT_FRAC`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attention_engine.rtl.golden import LOGIT_FRAC, fp16_bad
from attention_engine.rtl.params import PlaneShape
from csd_spec.arrays import I64, U8, U16

Bools = NDArray[np.bool_]

COEF_FRAC = 26
COEF_TOP = (1 << 12 + COEF_FRAC) - 1  # where a coefficient saturates, 2^12
MIN_EXPONENT, MAX_EXPONENT = -24, 9


def fp16_parts(bits: int) -> tuple[int, int]:
    """(sig, shift) of FP16 bits, worth sig x 2^(shift - 24) without the sign; NaN and infinity count as zero."""
    exponent, mantissa = bits >> 10 & 31, bits & 1023
    if exponent in (0, 31):
        return (mantissa, 0) if exponent == 0 else (0, 0)
    return mantissa | 1024, exponent - 1


def int8_value(code: int, exponent: int) -> int:
    """FP16 bits of code x 2^exponent; NaN for an exponent beyond -24 to 9, infinity for -128 x 2^9."""
    if not MIN_EXPONENT <= exponent <= MAX_EXPONENT:
        return 0x7E00
    if code == 0:
        return 0
    size, sign = abs(code), 0x8000 if code < 0 else 0
    place = size.bit_length() - 1 + exponent
    if place < -14:
        return sign | size << exponent + 24
    return sign | place + 15 << 10 | size << 11 - size.bit_length() & 1023


def int8_unpack(page: bytes, shape: PlaneShape) -> U16:
    """A page of K and V in 8 bits as FP16 bits: (2, n, d), K first."""
    d, n = shape.head_dim, shape.refined
    data = np.frombuffer(page, np.int8)
    exponents, codes = data[: 2 * d].reshape(2, 1, d), data[2 * d : 2 * d * (n + 1)].reshape(2, n, d)
    both = np.broadcast_arrays(codes, exponents)
    values = [int8_value(int(code), int(exponent)) for code, exponent in zip(*(b.ravel() for b in both), strict=True)]
    return np.array(values, np.uint16).reshape(2, n, d)


def fx_product(sig: int, shift: int, b: int, right: int, bits: int = 38) -> tuple[int, bool]:
    """Size of (sig x 2^shift) x b in units of 2^(right - 24), halves up, and whether it exceeds `bits` bits."""
    b_sig, b_shift = fp16_parts(b)
    size = ((sig * b_sig << shift + b_shift >> right - 1) + 1) >> 1
    return min(size, (1 << bits) - 1), size >> bits != 0


@dataclass(frozen=True, slots=True)
class PlaneScores:
    """What `plane_scores` gives out for a page."""

    x: I64  # (G, tokens), LOGIT_FRAC bits behind the point
    over: Bools  # (G, tokens): the score, or something of the page, saturated
    bad: bool  # NaN or infinity met, or widths that cannot be


def plane_scores(q: U16, page: bytes, tokens: int, shape: PlaneShape) -> PlaneScores:
    """Scores of a page's first tokens for q (G, d), FP16 bits."""
    d, data = shape.head_dim, np.frombuffer(page, np.uint8)
    scale, least = data[: 4 * d].view("<u2").reshape(2, d).tolist()
    told = data[4 * d : 5 * d]
    widths = np.minimum(told, 8)
    used = [value for value, width in zip(scale, widths, strict=True) if width]
    bad = bool((told > 8).any() or widths.sum() > shape.planes)
    bad |= any(fp16_bad(int(value)) for value in (*used, *least, *q.ravel()))
    channels = np.repeat(np.arange(d), widths)
    lifts = np.concatenate([np.arange(width) for width in widths])
    bits = planes(page, shape)[: len(channels)]
    sums, over = np.empty((len(q), shape.tokens), np.int64), False
    for row, line in zip(q, sums, strict=True):
        a, beyond = _products(row, scale, shape)
        raised = a[channels] << lifts
        over |= bool((np.abs(raised) > COEF_TOP).any() or beyond[widths > 0].any())
        offset, beyond = _products(row, least, shape)
        over |= bool(beyond.any())
        line[:] = np.clip(raised, -COEF_TOP, COEF_TOP)[: shape.planes] @ bits + offset.sum()
    rounded = sums[:, :tokens] + (1 << COEF_FRAC - LOGIT_FRAC - 1) >> COEF_FRAC - LOGIT_FRAC
    x = np.clip(rounded, -(1 << 31), (1 << 31) - 1)
    return PlaneScores(x, (x != rounded) | over, bad)


def planes(page: bytes, shape: PlaneShape) -> I64:
    """The bits of a page's planes: (R, T)."""
    start, T = shape.header_bytes, shape.tokens
    rows: U8 = np.frombuffer(page, np.uint8)[start : start + shape.rows * T // 2].reshape(shape.rows, T // 32, 1, 16)
    nibbles = np.concatenate([rows & 15, rows >> 4], axis=2).reshape(shape.rows, 1, T)
    return (nibbles >> np.arange(4).reshape(4, 1) & 1).astype(np.int64).reshape(shape.planes, T)


def _products(q: U16, values: list[int], shape: PlaneShape) -> tuple[I64, Bools]:
    """q x log2(e) / sqrt(d) x values, a channel each, and which of them saturate."""
    mant, exp = shape.scale
    out, over = np.zeros(len(q), np.int64), np.zeros(len(q), bool)
    for channel, (one, value) in enumerate(zip(q.tolist(), values, strict=True)):
        sig, shift = fp16_parts(one)
        size, over[channel] = fx_product(sig * mant + 1024 >> 11, shift, value, 37 + exp - COEF_FRAC)
        out[channel] = -size if (one ^ value) >> 15 else size
    return out, over
