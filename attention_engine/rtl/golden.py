"""Bit-exact models of the RTL units with Python integers: same order, same tables, same rounding.

An FP16 value is an integer in units of 2^-24, a product or sum is an integer in units of 2^-48. A score x is an integer
with `LOGIT_FRAC` fractional bits, in log2 units. Each function has the name of its RTL module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attention_engine.rtl.params import EngineRun
from attention_engine.rtl.tables import exp2_table
from csd_spec.arrays import U16

LOGIT_FRAC = 20
OUT_FRAC = 30
OUT_BITS = 48
_TABLE = exp2_table()


def fp16_units(bits: int) -> int:
    """Return the value of FP16 bits in units of 2^-24; NaN and infinity are zero (see `fp16_bad`)."""
    exponent, mantissa = bits >> 10 & 31, bits & 1023
    if exponent == 31:
        return 0
    size = mantissa if exponent == 0 else (mantissa | 1024) << exponent - 1
    return -size if bits >> 15 else size


def fp16_bad(bits: int) -> bool:
    return bits >> 10 & 31 == 31


def fp16_dot(a: Sequence[int], b: Sequence[int]) -> tuple[int, bool]:
    """Return the exact dot product of FP16 bits in units of 2^-48, and whether an input is NaN or infinity."""
    bad = any(fp16_bad(value) for value in (*a, *b))
    return sum(fp16_units(x) * fp16_units(y) for x, y in zip(a, b, strict=True)), bad


def fx_scale(
    total: int, mant: int, exp: int, bits: int = OUT_BITS, frac: int = OUT_FRAC, acc_bits: int = 88
) -> tuple[int, bool]:
    """Return round(total x mant x 2^-exp) with `frac` fractional bits, ties away from zero; saturates."""
    size, top = abs(total), (1 << bits - 1) - 1
    zeros = acc_bits - size.bit_length()
    raw = (size << zeros >> acc_bits - 32) * mant
    shift = zeros + exp + 80 - acc_bits - frac
    if raw == 0:
        return 0, False
    rounded = ((raw >> min(shift - 1, 200)) + 1) >> 1 if shift >= 1 else raw << 200
    over = rounded > top
    size = min(rounded, top)
    return (-size if total < 0 else size), over


def exp2_unit(x: int) -> tuple[int, int]:
    """Return 2^x as (floor(x), 24-bit mantissa); x has LOGIT_FRAC fractional bits."""
    whole, fraction = x >> LOGIT_FRAC, x & (1 << LOGIT_FRAC) - 1
    base, slope = _TABLE[fraction >> 12]
    return whole, 1 << 23 | base + (slope * (fraction & 4095) >> 12)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Output of `softmax_online` for a row of scores: m, l in units of 2^-32, its leading zeros of 48 bits, 1 / l."""

    top: int
    total: int
    zeros: int
    recip: int


def term(x: int, top: int) -> int:
    """Return 2^(x - top) in units of 2^-32, for an integer `top` above x."""
    whole, mant = exp2_unit(x - (top << LOGIT_FRAC))
    return (mant << 8) >> min(-whole - 1, 63)


def softmax_online(scores: Sequence[int]) -> Statistics:
    """Process a row of scores in one pass with a running maximum; the sum is rescaled by powers of two."""
    top = total = 0
    for number, x in enumerate(scores):
        above = (x >> LOGIT_FRAC) + 1
        now = max(top, above) if number else above
        total = (total >> min(now - top, 63) if number else 0) + term(x, now)
        top = now
    if total == 0:
        return Statistics(top, 0, 0, 0)
    zeros = 48 - total.bit_length()
    return Statistics(top, total, zeros, (1 << 47) // (total << zeros >> 24))


def ordered(key: int, bits: int, absolute: bool) -> int:
    """Return a key {sign, magnitude} as a number with the same order."""
    sign, size = key >> bits - 1, key & (1 << bits - 1) - 1
    if sign and not absolute and size:
        return ~key & (1 << bits) - 1
    return 1 << bits - 1 | size


def argtopk(keys: Sequence[int], k: int, recent: int = 0, absolute: bool = False, bits: int = 30) -> list[bool]:
    """Return which keys are among the k taken: the `recent` last, and the largest others, lowest index first."""
    old = len(keys) - recent
    best = sorted(range(old), key=lambda i: (-ordered(keys[i], bits, absolute), i))[: k - recent]
    taken = {*best, *range(old, len(keys))}
    return [i in taken for i in range(len(keys))]


@dataclass(frozen=True, slots=True)
class FilteredBeat:
    """A beat that passes `nfc_filter`; `end`: a wanted run ends in it."""

    data: tuple[int, ...]
    keep: tuple[bool, ...]
    run: int
    end: bool
    last: bool


def nfc_filter(page: Sequence[int], wanted: Sequence[bool], length: int, lanes: int) -> list[FilteredBeat]:
    """Return the beats of a page of FP16 bits that contain wanted values; the page ends with its last value."""
    runs = [*wanted, *[False] * (len(page) // length + 2)]
    beats = []
    for start in range(0, len(page), lanes):
        data = list(page[start : start + lanes])
        keep = [runs[(start + i) // length] for i in range(len(data))]
        if not any(keep):
            continue
        first = (start + keep.index(True)) // length
        own = start // length
        end = runs[own] and (own + 1) * length <= start + lanes
        last = (end and not any(runs[own + 1 :])) or start + lanes >= len(page)
        fill = lanes - len(data)
        beats.append(FilteredBeat((*data, *[0] * fill), (*keep, *[False] * fill), first, end, last))
    return beats


def score_scale(whole: int, kept: int, mant: int, exp: int) -> tuple[int, int]:
    """Return mant x 2^-exp times sqrt(whole / kept), with a 24-bit mant."""
    if kept == 0:
        root = 1 << 24
    else:
        ratio = (whole << 32) // kept
        root = math.isqrt(ratio << 16 if ratio < 1 << 52 else (1 << 68) - 1)
    product = root * mant
    extra = product.bit_length() - 24
    return product >> extra, exp + 24 - extra


def fx_key(value: int) -> int:
    """Return a 48-bit sum as a key: the position of its leading one, and the next 20 bits."""
    if value == 0:
        return 0
    size = value.bit_length()
    return size << 20 | (value << 48 - size >> 27) & (1 << 20) - 1


def group_score(parts: Sequence[tuple[int, int, Statistics]]) -> int:
    """Return the key of a token's score: the sum of 2^x / l; parts are (whole, mant) of exp2_unit and l of a query."""
    total = exponent = 0
    for number, (whole, mant, row) in enumerate(parts):
        product = mant * row.recip
        place = 24 if product >> 47 else 23
        value, power = product >> place, whole + row.zeros - 39 + place - 23
        if number == 0:
            total, exponent = value, power
            continue
        gap = min(abs(exponent - power), 31)
        if exponent < power:
            total, value, exponent = value, total, power
        total += value >> gap
    spare = total.bit_length() - 24
    total, exponent = total >> spare, exponent + spare
    field = exponent + 23 + 500
    return 0 if field <= 0 else field << 20 | (total >> 3) & (1 << 20) - 1


def value_weight(x: int, top: int) -> int:
    """Return 2^(x - top) in units of 2^-24 with 16 leading bits, rounded to nearest: a weight of V."""
    whole, mant = exp2_unit(x - (top << LOGIT_FRAC))
    down = -whole - 1
    if down > 24:
        return 0
    drop = max(8, down)
    return (mant + (1 << drop - 1) >> drop) << drop - down


def mix_out(out: int, rest: int, mean: int) -> int:
    """Return FP16 bits of out + rest x mean, rounded to nearest even, saturated.

    out is in units of 2^-30, rest in units of 2^-24, mean is FP16 bits.
    """
    addend = abs(rest * fp16_units(mean)) >> 18
    mixed = out - addend if mean >> 15 else out + addend
    size, sign = abs(mixed), 0x8000 if mixed < 0 else 0
    drop = max(size.bit_length() - 11, 6)
    rounded, cut = size >> drop, size & (1 << drop) - 1
    rounded += cut > 1 << drop - 1 or (cut == 1 << drop - 1 and rounded & 1)
    bits = rounded + (drop - 6 << 10)  # a mantissa overflow increments the exponent
    return sign | min(bits, 0x7BFF)


@dataclass(frozen=True, slots=True)
class SparfResult:
    """Output and selection of `sparf_engine`."""

    out: U16  # (G, d)
    channels: list[int]
    tokens: list[int]
    alpha: list[int]  # in units of 2^-24
    rows: list[tuple[int, int]]  # m and l of the attended tokens for each query: the sum of 2^x is l x 2^(m - 32)
    bad: bool


def score(total: int, mant: int, exp: int) -> int:
    """Return a sum as a 32-bit score x; saturates."""
    x = fx_scale(total, mant, exp)[0] >> OUT_FRAC - LOGIT_FRAC
    return max(-(1 << 31), min((1 << 31) - 1, x))


def sparf_engine(q: U16, keys: U16, values: U16, mean: U16, run: EngineRun) -> SparfResult:
    """Compute one head: q (G, d), K and V (S, d) and the mean of V (d,), all FP16 bits."""
    p, G = run.sparf, run.shape.q_heads
    Q, K, V = (np.array([[fp16_units(int(b)) for b in row] for row in part], object) for part in (q, keys, values))
    channels = np.flatnonzero(argtopk([fx_key(int(s)) for s in abs(Q).sum(0)], p.r, absolute=True))
    scales = [score_scale(abs(row).sum(), abs(row[channels]).sum(), *run.shape.scale) for row in Q]
    x = [
        [score(int(total), *scale) for total in K[:, channels] @ row[channels]]
        for row, scale in zip(Q, scales, strict=True)
    ]
    rows = [softmax_online(line) for line in x]
    parts = [[(*exp2_unit(s - (row.top << LOGIT_FRAC)), row) for s in line] for line, row in zip(x, rows, strict=True)]
    tokens = np.flatnonzero(argtopk([group_score([part[t] for part in parts]) for t in range(len(K))], p.k, p.l))
    out, alphas, sums = np.empty(q.shape, np.uint16), [], []
    for g in range(G):
        part = min(sum(term(x[g][t], rows[g].top) for t in tokens), rows[g].total)
        alpha = min((part << rows[g].zeros >> 16) * rows[g].recip >> 31, 1 << 24)
        exact = [score(int(total), *run.shape.scale) for total in K[tokens] @ Q[g]]
        row = softmax_online(exact)
        ratio = alpha * row.recip
        extra = ratio.bit_length() - 24
        mant = ratio >> extra if extra >= 0 else ratio << -extra
        weights = np.array([value_weight(s, row.top) for s in exact], object)
        exp = 37 - row.zeros + (50 - ratio.bit_length() if ratio else 0)
        for c, total in enumerate(weights @ V[tokens]):
            out[g, c] = mix_out(fx_scale(int(total), mant, exp)[0], (1 << 24) - alpha, int(mean[c]))
        alphas.append(alpha)
        sums.append((row.top, row.total))
    seen = [keys[:, channels], keys[tokens], values[tokens], q, mean]
    bad = any(((part >> 10 & 31) == 31).any() for part in seen)
    return SparfResult(out, channels.tolist(), tokens.tolist(), alphas, sums, bad)
