"""Bit-exact integer model of `progressive_engine`: scores, page selection and sums of one head.

Weights are 2^(x - m), with m from the scores of a query's score pages. A token of a chosen refined page has its exact
score and weight, which may exceed one (up to 2^8; larger weights are clamped and reported), and its 8-bit V. All other
tokens have the weight from the score page and V from the value page, or no V if that page is not read. l is the sum of
all weights, including those of unread pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attention_engine.rtl.golden import (
    LOGIT_FRAC,
    OUT_BITS,
    Statistics,
    exp2_unit,
    fp16_bad,
    fp16_units,
    fx_scale,
    mix_out,
    softmax_online,
    value_weight,
)
from attention_engine.rtl.golden_progressive import (
    Bools,
    digit_scores,
    hadamard,
    int8_unpack,
    page_gains,
    page_limits,
    share,
    value_sums,
    value_weights,
)
from attention_engine.rtl.params import ProgressiveRun
from csd_spec.arrays import I64, U16
from csd_spec.progressive import SIGNS

HEADROOM = 8  # maximum excess of an exact score over m
TOTAL_BITS = 56  # of l


@dataclass(frozen=True, slots=True)
class GoldenPages:
    """Pages of one head: score pages by group and channel part, refined pages, value pages by group and part."""

    scores: Sequence[Sequence[bytes]]
    refined: Sequence[bytes]
    values: Sequence[Sequence[bytes]]


@dataclass(frozen=True, slots=True)
class ProgressiveResult:
    """Output and selection of `progressive_engine`."""

    out: U16  # (G, d)
    x: I64  # (G, S), scores from score pages
    chosen: Bools  # refined pages
    read: Bools  # value pages
    rows: list[tuple[int, int]]  # m and l of each query
    bad: bool
    over: bool


def reciprocal(total: int) -> tuple[int, int, bool]:
    """Return 1 / l = mant x 2^-exp as (mant, exp), for l in units of 2^-32, and whether l was too small."""
    if total == 0:
        return 0, 0, False
    zeros = TOTAL_BITS - total.bit_length()
    recip = (1 << 47) // (total << zeros >> TOTAL_BITS - 24)
    exp = 47 - zeros
    if recip >> 24:
        recip, exp = 1 << 23, exp - 1
    return recip, max(exp, 0), exp < 0


def multiply_scales(mant: int, exp: int, other: tuple[int, int]) -> tuple[int, int]:
    """Return the product of two scales with a 24-bit mant, truncated."""
    product = mant * other[0]
    extra = 24 if product >> 47 else 23
    return product >> extra, exp + other[1] - extra


def term(x: int, top: int) -> int:
    """Return 2^(x - top) in units of 2^-32."""
    whole, mant = exp2_unit(x - (top << LOGIT_FRAC))
    return (mant << 16) >> min(7 - whole, 63)


def saturate(value: int, bits: int) -> tuple[int, bool]:
    """Return a value clamped to the symmetric range of `bits` bits, two's complement, and whether it was clamped."""
    most = (1 << bits - 1) - 1
    return max(-most, min(most, value)), abs(value) > most


class _Engine:
    """Steps of a run; they record errors in `bad` and `over`."""

    def __init__(self, q: U16, pages: GoldenPages, run: ProgressiveRun) -> None:
        self.q, self.pages, self.run, self.shape = q, pages, run, run.shape
        self.G, self.S = len(q), run.seq_len
        self.bad = self.over = False
        self.x = self._scores()
        self.rows: list[Statistics] = [softmax_online(line) for line in self.x.tolist()]

    def _scores(self) -> I64:
        T, parts = self.shape.form.T, []
        for group, pages in enumerate(self.pages.scores):
            scores = digit_scores(self.q, pages, min(T, self.S - group * T), self.shape)
            self.bad |= scores.bad
            self.over |= bool(scores.over.any())
            parts.append(scores.x)
        return np.concatenate(parts, axis=1)

    def choose(self) -> tuple[Bools, Bools]:
        """Return the chosen refined pages and the value pages to read."""
        thresholds = self.run.gain_threshold, self.run.mass_threshold
        limits = [page_limits(row.total, thresholds) for row in self.rows]
        lines = zip(self.x.tolist(), self.rows, strict=True)
        shares = np.array([[share(x, row.top) for x in line] for line, row in lines], np.int64)
        return page_gains(shares, limits, self.shape.refined, self.shape.form.value_tokens)

    def refine(self, chosen: Bools) -> tuple[list[list[int]], list[int]]:
        """Return the sums of V (G, d) over tokens of the chosen pages in units of 2^-48, and their l."""
        n, d = self.shape.refined, self.shape.head_dim
        mant, exp = self.shape.scale
        sums, totals = [[0] * d for _ in range(self.G)], [0] * self.G
        for page in np.flatnonzero(chosen).tolist():
            K, V = int8_unpack(self.pages.refined[page], self.shape)[:, : min(n, self.S - page * n)]
            self.bad |= any(fp16_bad(value) for value in (*K.ravel().tolist(), *V.ravel().tolist()))
            keys, values = ([[fp16_units(v) for v in row] for row in part.tolist()] for part in (K, V))
            for g, row in enumerate(self.q.tolist()):
                units, top = [fp16_units(value) for value in row], self.rows[g].top
                for key, value in zip(keys, values, strict=True):
                    total = sum(a * b for a, b in zip(units, key, strict=True))
                    x, over = fx_scale(total, mant, exp, 32, LOGIT_FRAC)
                    most = (top + HEADROOM << LOGIT_FRAC) - 1
                    self.over |= over or x > most
                    x = min(x, most)
                    totals[g] += term(x, top)
                    weight = value_weight(x, top)
                    sums[g] = [a + weight * b for a, b in zip(sums[g], value, strict=True)]
        return sums, totals

    def sum_values(self, chosen: Bools, read: Bools) -> list[list[int]]:
        """Return the sums (G, d) of value pages in units of 2^-24, rotated back without the scale factor."""
        n, count, m = self.shape.refined, self.shape.form.value_tokens, self.shape.m
        totals = [[0] * self.shape.head_dim for _ in range(self.G)]
        for group in np.flatnonzero(read).tolist():
            tokens = range(group * count, min((group + 1) * count, self.S))
            for part, page in enumerate(self.pages.values[group]):
                sizes = np.frombuffer(page, np.uint16)[: len(tokens)].tolist()
                for g, row in enumerate(self.rows):
                    line = self.x[g].tolist()
                    weights = [0 if chosen[t // n] else value_weight(line[t], row.top) for t in tokens]
                    W, power, bad = value_weights(weights, sizes)
                    self.bad |= bad
                    sums = value_sums(np.array([W]), page, self.shape)[0].tolist()
                    for c, value in enumerate(sums):
                        totals[g][part * m + c] += value << power
        return [hadamard(row, self.shape.rotation) for row in totals]


def progressive_engine(q: U16, pages: GoldenPages, run: ProgressiveRun) -> ProgressiveResult:
    """Compute one head from q (G, d), FP16 bits, and its pages."""
    engine, shape = _Engine(q, pages, run), run.shape
    chosen, read = engine.choose()
    sums, exact = engine.refine(chosen)
    values = engine.sum_values(chosen, read)
    out, rows = np.empty(q.shape, np.uint16), []
    for g, row in enumerate(engine.rows):
        line = engine.x[g].tolist()
        total = exact[g] + sum(term(x, row.top) for t, x in enumerate(line) if not chosen[t // shape.refined])
        mant, exp, small = reciprocal(total)
        mant_v, exp_v = multiply_scales(mant, exp, shape.unrotate)
        engine.over |= small
        for c in range(shape.head_dim):
            a, over_a = fx_scale(sums[g][c], mant, exp, acc_bits=96)
            b, over_b = fx_scale(values[g][c] << 24, mant_v, exp_v, acc_bits=96)
            both, over = saturate(a - b if int(SIGNS) >> c % shape.m % 64 & 1 else a + b, OUT_BITS)
            engine.over |= over_a or over_b or over
            out[g, c] = mix_out(both, 0, 0)
        rows.append((row.top, total))
    return ProgressiveResult(out, engine.x, chosen, read, rows, engine.bad, engine.over)
