"""Clock model of the engine: cycles of each unit as a function of its work."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from attention_engine.rtl.params import EngineRun, EngineShape, ProgressiveShape
from csd_spec import EngineSpec

_TOPK_PASSES = 3  # histogram, threshold, collect


class EngineClock:
    """Model of the time that one unit needs for its work, in nanoseconds. All cycle counts are rounded up.

    | unit | cycles |
    |---|---|
    | kernel | lines x ceil(length / lanes) x queries / kernel_efficiency |
    | softmax, after a kernel | scores x queries / softmax_ways |
    | argtopk | 3 x values / topk_ways |
    | NFC filter, one for each channel | bytes / nfc_bytes_per_cycle, during the transfer: `DriveSpec.channel_timing` |
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec

    def kernel_ns(self, beats: int) -> int:
        """Return the time of one kernel for `beats` = lines x ceil(length / lanes) x queries."""
        return self._ns(-int(-beats // self.spec.kernel_efficiency))

    def softmax_ns(self, scores: int) -> int:
        """Return the softmax time of one kernel."""
        return self._ns(-(-scores // self.spec.softmax_ways))

    def topk_ns(self, values: int) -> int:
        """Return the argtopk time for `values` values."""
        return self._ns(-(-_TOPK_PASSES * values // self.spec.topk_ways))

    def _ns(self, cycles: int) -> int:
        return -(-cycles * 1_000_000_000 // self.spec.clock_hz)


def argtopk_cycles(keys: int, ways: int, digit: int = 10) -> int:
    """Return the cycles of the argtopk unit in the RTL (`rtl/argtopk.sv`) from the last key to the last bit.

    The unit makes three passes over the keys, and scans the bins of each of three digits in two levels.
    """
    return 3 * -(-keys // ways) + 3 * ((2 << digit // 2) + 11) + 3


def sparf_cycles(run: EngineRun, channels: Sequence[int], tokens: Sequence[int]) -> int:
    """Return the cycles of the RTL engine (`rtl/sparf_engine.sv`) for one head, from start to the last output value.

    The model assumes that pages arrive without delay when the engine requests them. The engine requests a page when its
    walk over the bitmap (one bit per cycle) finds it. A page streams by at one beat per cycle; a beat that passes the
    filter takes one cycle for each query. Score sums drain, one per cycle, during the pages of the next group.

    Args:
        run: Parameters of the run.
        channels: Selected channels; the engine reads their pages.
        tokens: Selected tokens; the engine reads their pages.
    """
    shape, G, r = run.shape, run.shape.q_heads, run.sparf.r
    choose = shape.head_dim * (G + 1) + _CHANNEL_KEY + argtopk_cycles(shape.head_dim, shape.topk_ways)
    beats = r * run.group_tokens // shape.lanes  # beats of a group that pass the filter
    stream = _stream(channels, run.m, shape, run.group_tokens // shape.lanes, _SUM)
    stored, drained, words = [0, 0], [0, 0], 0  # end cycles of sums, drains; last sum words
    for group in range(run.groups):
        length = min(run.group_tokens, run.seq_len - group * run.group_tokens)
        taken = _FETCH * words * beats * G // stream  # drain reads that conflict with a row
        stored.append(max(stored[-1], drained[-2]) + stream + taken)
        scaled = stored[2] + _SCALE * G  # the first group yields the norm of its channels
        words = G * -(-length // shape.lanes)
        drained.append(max(drained[-1], stored[-1], scaled) + _DRAIN + words * shape.lanes)
    wiped = _BINS - -(-shape.head_dim // shape.topk_ways)  # argtopk accepts no new keys before this cycle
    scored = max(drained[-1] + _RECIPROCAL * G + _FILL, wiped)
    weigh = run.seq_len * G + _TOKEN_KEY + argtopk_cycles(run.seq_len, shape.topk_ways)
    keys, values = (_stream(tokens, run.n, shape, shape.head_dim // shape.lanes, least) for least in (1, _SUM))
    rest = shape.page_beats - (max(tokens) % run.n + 1) * shape.head_dim // shape.lanes  # the engine skips these beats
    return choose + scored + weigh + keys + values - 2 * rest + _RECIPROCAL * G + _MIX + G * shape.head_dim + _FILL


def _stream(chosen: Sequence[int], units: int, shape: EngineShape, beats: int, least: int) -> int:
    """Return the cycles for the pages with a chosen unit, found by a walk from the first bit.

    A page has `units` units of `beats` beats. The page stops while a chosen beat is used for all queries, and for at
    least `least` cycles at a chosen unit. If the next unit is not chosen, a queue lets the page continue.
    """
    chosen, full = sorted(chosen), units * beats == shape.page_beats
    gaps = sum(not (b == a + 1 if b % units else full and (a + 1) % units == 0) for a, b in pairwise(chosen))
    waits = (len(chosen) * beats - min(_QUEUE, beats) * gaps) * (shape.q_heads - 1)
    waits += max(0, least - beats * shape.q_heads) * (len(chosen) - 1 - gaps)
    pages, end = sorted({unit // units for unit in chosen}), 0.0
    for page in pages:
        end = max(end, (page + 1) * units) + shape.page_beats + waits / len(pages)
    return round(end)


def digit_cycles(shape: ProgressiveShape, tokens: int, widths: Sequence[Sequence[int]] = ()) -> int:
    """Return the cycles of `rtl/digit_scores.sv` for a head, from the first beat of its pages to the last score.

    The model assumes that beats arrive without delay and that the receiver accepts each score at once. A beat of a line
    takes one cycle for each query, all other beats take one cycle.

    Args:
        shape: Parameters of the unit.
        tokens: Number of tokens.
        widths: Digits of each channel for each page. By default, all pages are full of digits.
    """
    form, G, m = shape.form, shape.q_heads, shape.m
    lines, head, beats = form.D // 16, form.header_bytes // 16, shape.page_bytes // 16
    came = free = handed = coded = 0  # ends: page input, header, products, coefficients
    out = [0, 0]  # cycles at which pages are output
    ends, output = [0], [0, 0]  # cycles at which blocks of 16 tokens are summed and output
    for number in range(-(-tokens // form.T) * shape.parts):
        length = min(form.T, tokens - number // shape.parts * form.T)
        blocks = -(-length // 16)
        header = max(came, free) + head
        free = max(header + 1, handed) + m * G
        handed = max(free + _MADE, coded, out[-2])
        missing = max(0, form.D - sum(min(width, 4) for width in widths[number])) if widths else 0
        coded = handed + (m + -(-missing // 4)) * G + _CODED
        at, gap = max(ends[-1], coded), _CLEAR * (shape.parts > 1)
        for block in range(blocks):
            at = max(at + 4 * (lines - 1) * G, output[-2]) + 4 * G
            ends.append(at)
            output.append(max(output[-1] + gap * (block == 0), at + _ADDED) + min(16, length - 16 * block) * G)
        out.append(output[-1])
        taken = 4 * lines * (len(ends) - 1) - _QUEUED  # beats in use when the last beat enters the queue
        came = (
            max(header + 4 * lines * blocks, ends[max(0, -(-taken // (4 * lines)))]) + beats - head - 4 * lines * blocks
        )
    return max(came, output[-1] + _GIVEN)


# Latencies of the units of sparf_engine and digit_scores, in cycles
_CHANNEL_KEY, _TOKEN_KEY = 9, 19  # from the q of a channel, and from the last score of a token, to argtopk
_SUM = 4  # between additions to the same sum
_QUEUE = 2  # beats between filter and products
_SCALE = 124  # ratio of norms and its square root, for each query
_FETCH = 5  # read of one word of sums
_DRAIN = 9  # to the first sum of a bank
_RECIPROCAL = 55  # for each query
_MIX = 20  # alpha / l after the last reciprocal, and the first weight
_BINS = 1024  # bins of argtopk
_FILL = 50  # pipelines, at the changes of phase
_MADE, _CODED = 9, 8  # from the last products of a header, and the last coefficients of a page
_ADDED, _CLEAR, _GIVEN = (
    5,
    6,
    14,
)  # last beat of a block to its first score; between pages of a sum; to a score
_QUEUED = 256  # queued beats of lines
