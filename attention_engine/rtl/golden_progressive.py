"""Bit-exact integer models of the units for progressive-precision pages (`csd_spec.progressive`).

Scores: q is FP16. The digit of level l (0 is the lowest) of a channel has the coefficient q x scale x 4^l, which is
exact. `top` is the position of the largest coefficient of a page: it is in [2^(top - 49), 2^(top - 48)), and top is 0
if all are zero. With e = top - 55, each coefficient is converted to int8: coefficient x 2^-e, rounded half to even and
clamped to -127..127. acc is the sum of int8 x digit; offset is the sum over all channels of q x minimum x 2^20, each
rounded half to even:

    logit x sqrt(d) = offset x 2^-20 + acc x 2^e,

which is an integer in units of 2^-55; pages of the same tokens are summed in these units. The score x is this value
times log2(e) / sqrt(d), with `LOGIT_FRAC` fractional bits: `golden.fx_scale` of the leading 32 bits of the sum and 24
bits of the factor, rounded once, ties away from zero. e above 21 is clamped to 21 and reported.

Value pages: a weight w is an integer in units of 2^-24 (`golden.value_weight`), w x size is in units of 2^-48. The
largest product of a page and query has `top` bits, at least 32, and each product is converted to a 7-bit W: w x size x
2^(7 - top), rounded half up, at most 127. A page adds to the sum of a rotated channel

    (2 x sum of W x code - (2^b - 1) x sum of W) << top - 32

in units of 2^-24, exactly. The error of a weight is at most half a unit, 1/128 to 1/256 of the largest of the page.

Selection: a weight w is an integer in units of 2^-17, rounded half up; l is truncated to these units. A refined page is
chosen if the sum of w^2 exceeds floor(threshold x l^2) for at least one query; a value page is read if the sum of w
exceeds floor(threshold x l). Thresholds have 32 fractional bits. The error of w is at most 2^-18, so the error of a
gain of n tokens is 2^-17 x the sum of w + n x 2^-36, that of a mass n x 2^-18, and that of l 2^-17.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attention_engine.rtl.golden import LOGIT_FRAC, exp2_unit, fp16_bad, fp16_units, fx_scale
from attention_engine.rtl.params import ProgressiveShape
from csd_spec.arrays import I64, U8, U16
from csd_spec.progressive import DIGITS, LANES, LINE, MAX_CODE, QUAD

Bools = NDArray[np.bool_]

OFFSET_FRAC = 20
UNIT = 55  # a sum over channels is an integer in units of 2^-55
MAX_TOP = 76
MIN_EXPONENT, MAX_EXPONENT = -24, 9
WEIGHT_BITS, MIN_VALUE_TOP = 7, 32
SHARE_FRAC = 17  # fractional bits of weights for page selection
GAIN_BITS, MASS_BITS = 42, 25


def fp16_parts(bits: int) -> tuple[int, int]:
    """Return (sig, shift) of FP16 bits, equal to sig x 2^(shift - 24) without the sign; NaN and infinity are zero."""
    exponent, mantissa = bits >> 10 & 31, bits & 1023
    if exponent in (0, 31):
        return (mantissa, 0) if exponent == 0 else (0, 0)
    return mantissa | 1024, exponent - 1


def int8_value(code: int, exponent: int) -> int:
    """Return FP16 bits of code x 2^exponent; NaN if the exponent is not in -24..9, infinity for -128 x 2^9."""
    if not MIN_EXPONENT <= exponent <= MAX_EXPONENT:
        return 0x7E00
    if code == 0:
        return 0
    size, sign = abs(code), 0x8000 if code < 0 else 0
    place = size.bit_length() - 1 + exponent
    if place < -14:
        return sign | size << exponent + 24
    return sign | place + 15 << 10 | size << 11 - size.bit_length() & 1023


def int8_unpack(page: bytes, shape: ProgressiveShape) -> U16:
    """Return a refined page as FP16 bits: (2, n, d), K first."""
    d, n = shape.head_dim, shape.refined
    data = np.frombuffer(page, np.int8)
    codes = data[shape.form.refined_header : shape.form.refined_bytes].reshape(2, n, d)
    exponents = np.stack(np.broadcast_arrays(data[:d], data[d : d + n, None]))
    both = codes.ravel(), exponents.ravel()
    values = [int8_value(int(code), int(exponent)) for code, exponent in zip(*both, strict=True)]
    return np.array(values, np.uint16).reshape(2, n, d)


def round_even(value: int, right: int) -> int:
    """Return value x 2^-right for a positive value, ties to even."""
    rounded, cut = value >> right, value & (1 << right) - 1
    return rounded + (2 * cut > 1 << right or (2 * cut == 1 << right and rounded & 1))


def fx_product(sig: int, shift: int, b: int, right: int, bits: int = 38) -> tuple[int, bool]:
    """Return |(sig x 2^shift) x b| in units of 2^(right - 24), ties to even, and whether it exceeds `bits` bits."""
    b_sig, b_shift = fp16_parts(b)
    size = round_even(sig * b_sig << shift + b_shift, right)
    return min(size, (1 << bits) - 1), size >> bits != 0


def digit_dots(digits: U8, coefs: Sequence[int]) -> list[int]:
    """Return the sums of coefficient x digit for the four rows of 16 digits in 16 bytes."""
    rows = (digits.reshape(4, 1, QUAD) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3).reshape(4, LANES)
    return [int(row.astype(np.int64) @ np.array(coefs, np.int64)) for row in rows]


def page_digits(page: bytes, shape: ProgressiveShape) -> I64:
    """Return the digits of a score page: (T, D)."""
    form = shape.form
    lines: U8 = np.frombuffer(page, np.uint8)[form.header_bytes :][: form.T // LANES * 4 * form.D]
    parts = lines.reshape(-1, form.D // LANES, 1, LINE) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    by_token = parts.reshape(-1, form.D // LANES, 4, LANES, QUAD).transpose(0, 3, 1, 2, 4)
    return by_token.reshape(form.T, form.D).astype(np.int64)


@dataclass(frozen=True, slots=True)
class DigitSums:
    """Sums of a score page and a query before scaling."""

    acc: I64  # (G, tokens)
    top: I64  # (G,); e is top - 55
    offset: I64  # (G,) in units of 2^-20
    bad: bool  # NaN, infinity or invalid digits in the input


def coefficients(products: Sequence[int], widths: Sequence[int]) -> tuple[list[int], int]:
    """Return int8 coefficients of all digits of channels, and top. products are q x scale in units of 2^-48."""
    used = [(value, width) for value, width in zip(products, widths, strict=True) if width and value]
    top = max((abs(value).bit_length() + 2 * (width - 1) for value, width in used), default=0)
    coefs = []
    for value, width in zip(products, widths, strict=True):
        for level in range(width):
            size = min(round_even(abs(value) << 2 * level + 7, top), MAX_CODE) if value else 0
            coefs.append(-size if value < 0 else size)
    return coefs, top


def digit_sums(q: U16, page: bytes, tokens: int, shape: ProgressiveShape) -> DigitSums:
    """Return the sums of the first tokens of a page for q (G, m), FP16 bits."""
    m, D, data = shape.m, shape.form.D, np.frombuffer(page, np.uint8)
    scale, least = data[: 4 * m].view("<u2").reshape(2, m).tolist()
    told = data[4 * m : 5 * m]
    widths = np.minimum(told, DIGITS).tolist()
    seen = [*(value for value, width in zip(scale, widths, strict=True) if width), *least, *q.ravel().tolist()]
    bad = bool((told > DIGITS).any() or sum(widths) > D) or any(fp16_bad(int(value)) for value in seen)
    digits = page_digits(page, shape)[:tokens]
    acc, top, offset = (np.zeros(size, np.int64) for size in ((len(q), tokens), len(q), len(q)))
    for g, row in enumerate(q.tolist()):
        units = [fp16_units(value) for value in row]
        coefs, top[g] = coefficients([a * fp16_units(b) for a, b in zip(units, scale, strict=True)], widths)
        kept = np.array(coefs[:D], np.int64)
        acc[g] = digits[:, : len(kept)] @ kept
        for a, b in zip(units, least, strict=True):
            product = a * fp16_units(b)
            size = round_even(abs(product), 48 - OFFSET_FRAC)
            offset[g] += -size if product < 0 else size
    return DigitSums(acc, top, offset, bad)


@dataclass(frozen=True, slots=True)
class DigitScores:
    """Output of `digit_scores` for the pages of some tokens."""

    x: I64  # (G, tokens), LOGIT_FRAC fractional bits
    over: Bools  # (G, tokens): the score saturated, or e was above 21
    bad: bool
    parts: list[DigitSums]  # page by page


def digit_scores(q: U16, pages: Sequence[bytes], tokens: int, shape: ProgressiveShape) -> DigitScores:
    """Return the scores of the first tokens of pages with d / m channel parts; q (G, d), FP16 bits."""
    mant, exp = shape.scale
    m = shape.m
    parts = [digit_sums(q[:, i * m : (i + 1) * m], page, tokens, shape) for i, page in enumerate(pages)]
    x, over = np.zeros((len(q), tokens), np.int64), np.zeros((len(q), tokens), bool)
    for g, t in np.ndindex(x.shape):
        lifted = [int(part.acc[g, t]) << min(int(part.top[g]), MAX_TOP) for part in parts]
        total = sum(lifted) + (sum(int(part.offset[g]) for part in parts) << UNIT - OFFSET_FRAC)
        x[g, t], over[g, t] = fx_scale(total, mant, exp + UNIT - 48, 32, LOGIT_FRAC, 96)
        over[g, t] |= any(part.top[g] > MAX_TOP for part in parts)
    return DigitScores(x, over, any(part.bad for part in parts), parts)


def page_codes(page: bytes, shape: ProgressiveShape) -> I64:
    """Return the codes of a value page: (tokens, m)."""
    form = shape.form
    count, lines, block, bits = form.value_tokens, form.value_lines, form.value_block, form.v_bits
    body: U8 = np.frombuffer(page, np.uint8)[form.value_header :][: count // block * lines * LINE]
    parts = body.reshape(-1, lines, 1, LINE) >> np.arange(0, 8, bits, dtype=np.uint8)[:, None] & (1 << bits) - 1
    by_token = parts.reshape(-1, lines, 8 // bits, LANES, QUAD).transpose(0, 2, 4, 1, 3)
    return by_token.reshape(count, lines * LANES)[:, : form.m].astype(np.int64)


def value_sums(weights: I64, page: bytes, shape: ProgressiveShape) -> I64:
    """Return the sums of a value page (G, m) for weights W (G, tokens) of its first tokens."""
    codes = page_codes(page, shape)[: weights.shape[1]]
    sums: I64 = 2 * weights @ codes - ((1 << shape.v_bits) - 1) * weights.sum(1, keepdims=True)
    return sums


def value_weights(weights: Sequence[int], sizes: Sequence[int]) -> tuple[list[int], int, bool]:
    """Return W of tokens, the power of two of their sums, and whether a size is invalid.

    weights are in units of 2^-24, sizes are FP16 bits. A size that is NaN, infinite or negative is zero and is
    reported.
    """
    bad = any(fp16_bad(size) or (size >> 15 and fp16_units(size)) for size in sizes)
    products = [weight * max(fp16_units(size), 0) for weight, size in zip(weights, sizes, strict=True)]
    top = max(MIN_VALUE_TOP, *(product.bit_length() for product in products))
    down = top - WEIGHT_BITS
    small = [min(product + (1 << down - 1) >> down, MAX_CODE) for product in products]
    return small, top - MIN_VALUE_TOP, bool(bad)


def hadamard(values: Sequence[int], size: int) -> list[int]:
    """Return runs of `size` values multiplied by a Hadamard matrix of +1 and -1."""
    out, step = list(values), 1
    while step < size:
        for first in range(0, len(out), 2 * step):
            for i in range(first, first + step):
                out[i], out[i + step] = out[i] + out[i + step], out[i] - out[i + step]
        step *= 2
    return out


def share(x: int, top: int) -> int:
    """Return 2^(x - top) in units of 2^-17, rounded half up, below one: a weight for page selection."""
    whole, mant = exp2_unit(x - (top << LOGIT_FRAC))
    down = 23 - SHARE_FRAC - whole
    return min(mant + (1 << down - 1) >> down, (1 << SHARE_FRAC) - 1)


def page_limits(total: int, thresholds: tuple[int, int]) -> tuple[int, int]:
    """Return the limits for the gain and the mass of a page; saturates.

    l is in units of 2^-32, thresholds for gains and masses also.
    """
    cut = total >> 32 - SHARE_FRAC
    gain, mass = cut * cut * thresholds[0] >> 32, cut * thresholds[1] >> 32
    return min(gain, (1 << GAIN_BITS) - 1), min(mass, (1 << MASS_BITS) - 1)


def page_gains(shares: I64, limits: Sequence[tuple[int, int]], refined: int, values: int) -> tuple[Bools, Bools]:
    """Return which refined pages are chosen and which value pages are read.

    shares (G, S) are weights of tokens; refined and values are the tokens of a page.
    """

    def exceed(parts: I64, size: int, which: int) -> Bools:
        sums = np.add.reduceat(parts, np.arange(0, parts.shape[1], size), axis=1)
        over: Bools = sums > np.array([limit[which] for limit in limits])[:, None]
        return np.asarray(over.any(axis=0))

    return exceed(shares**2, refined, 0), exceed(shares, values, 1)
