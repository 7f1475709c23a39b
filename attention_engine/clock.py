"""The engine's clock: cycles of each unit from the work it is given."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from attention_engine.rtl.params import EngineRun, EngineShape, ProgressiveShape
from csd_spec import EngineSpec

_TOPK_PASSES = 3  # histogram, threshold, collect


class EngineClock:
    """Modelled time of one unit at work, in nanoseconds. All figures in cycles are rounded up.

    | unit | cycles |
    |---|---|
    | kernel | lines x ceil(length / lanes) x queries / kernel_efficiency |
    | softmax, behind a kernel | scores x queries / softmax_ways |
    | argtopk | 3 x values / topk_ways |
    | NFC filter, one on each channel | bytes / nfc_bytes_per_cycle, under the transfer: `DriveSpec.channel_timing` |
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec

    def kernel_ns(self, beats: int) -> int:
        """One kernel for that many beats: lines x ceil(length / lanes) x queries."""
        return self._ns(-int(-beats // self.spec.kernel_efficiency))

    def softmax_ns(self, scores: int) -> int:
        """One kernel's softmax."""
        return self._ns(-(-scores // self.spec.softmax_ways))

    def topk_ns(self, values: int) -> int:
        """argtopk over `values` values."""
        return self._ns(-(-_TOPK_PASSES * values // self.spec.topk_ways))

    def _ns(self, cycles: int) -> int:
        return -(-cycles * 1_000_000_000 // self.spec.clock_hz)


def argtopk_cycles(keys: int, ways: int, digit: int = 10) -> int:
    """Cycles of the RTL's argtopk (`rtl/argtopk.sv`) from the last key to the last bit.

    Three passes over the keys; a scan of the bins of each of three digits, in two levels.
    """
    return 3 * -(-keys // ways) + 3 * ((2 << digit // 2) + 11) + 3


def sparf_cycles(run: EngineRun, channels: Sequence[int], tokens: Sequence[int]) -> int:
    """Cycles of the RTL's engine (`rtl/sparf_engine.sv`) for one head, from start to the last value of the output.

    channels, tokens: what is selected; its pages are read. Pages are there when they are asked for, and asked for as
    fast as a walk over the bitmap, a bit a cycle, finds them. A page streams by at a beat a cycle; what the filter lets
    through takes a cycle for each query.
    Sums of scores drain, one a cycle, under the pages of the next group.
    """
    shape, G, r = run.shape, run.shape.q_heads, run.sparf.r
    choose = shape.head_dim * (G + 1) + _CHANNEL_KEY + argtopk_cycles(shape.head_dim, shape.topk_ways)
    beats = r * run.group_tokens // shape.lanes  # that pass the filter in a group
    stream = _stream(channels, run.m, shape, run.group_tokens // shape.lanes, _SUM)
    stored, drained, words = [0, 0], [0, 0], 0  # when groups were summed and drained; words of sums of the last one
    for group in range(run.groups):
        length = min(run.group_tokens, run.seq_len - group * run.group_tokens)
        taken = _FETCH * words * beats * G // stream  # the drain's reads that meet a row
        stored.append(max(stored[-1], drained[-2]) + stream + taken)
        scaled = stored[2] + _SCALE * G  # the first group's rows tell the norm of the selected channels
        words = G * -(-length // shape.lanes)
        drained.append(max(drained[-1], stored[-1], scaled) + _DRAIN + words * shape.lanes)
    wiped = _BINS - -(-shape.head_dim // shape.topk_ways)  # before that argtopk takes no new keys
    scored = max(drained[-1] + _RECIPROCAL * G + _FILL, wiped)
    weigh = run.seq_len * G + _TOKEN_KEY + argtopk_cycles(run.seq_len, shape.topk_ways)
    keys, values = (_stream(tokens, run.n, shape, shape.head_dim // shape.lanes, least) for least in (1, _SUM))
    rest = shape.page_beats - (max(tokens) % run.n + 1) * shape.head_dim // shape.lanes  # is not waited for
    return choose + scored + weigh + keys + values - 2 * rest + _RECIPROCAL * G + _MIX + G * shape.head_dim + _FILL


def _stream(chosen: Sequence[int], units: int, shape: EngineShape, beats: int, least: int) -> int:
    """Cycles of the pages with something chosen, `units` of `beats` a page, found by a walk from the first bit on.

    A chosen beat is kept for all queries, a chosen unit for `least` cycles, and the page waits; where the next one is
    not chosen, a queue lets it go on.
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
    """Cycles of the RTL's `rtl/digit_scores.sv` for a head: from its pages' first beat to the last beat and score.

    widths: digits of each channel, page by page; without it all pages are full of digits. Beats are there when they are
    taken, scores go as they come. A beat of a line takes a cycle a query, any other one a cycle.
    """
    form, G, m = shape.form, shape.q_heads, shape.m
    lines, head, beats = form.D // 16, form.header_bytes // 16, shape.page_bytes // 16
    came = free = handed = coded = 0  # page in, header free, products handed over, coefficients there
    out = [0, 0]  # when pages are given out
    ends, given = [0], [0, 0]  # when blocks of 16 tokens are added up, and given out
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
            at = max(at + 4 * (lines - 1) * G, given[-2]) + 4 * G
            ends.append(at)
            given.append(max(given[-1] + gap * (block == 0), at + _ADDED) + min(16, length - 16 * block) * G)
        out.append(given[-1])
        taken = 4 * lines * (len(ends) - 1) - _QUEUED  # as many beats are used when the last one finds room
        came = (
            max(header + 4 * lines * blocks, ends[max(0, -(-taken // (4 * lines)))]) + beats - head - 4 * lines * blocks
        )
    return max(came, given[-1] + _GIVEN)


# Latencies of sparf_engine's and digit_scores' units, in cycles
_CHANNEL_KEY, _TOKEN_KEY = 9, 19  # from a channel's q, from a token's last score to argtopk
_SUM = 4  # until a sum can be added to again
_QUEUE = 2  # beats between filter and products
_SCALE = 124  # ratio of norms and its root, a query
_FETCH = 5  # of a word of sums
_DRAIN = 9  # to the first sum of a bank
_RECIPROCAL = 55  # a query
_MIX = 20  # alpha / l after the last reciprocal, and the first weight
_BINS = 1024  # bins of argtopk
_FILL = 50  # pipelines, at the changes of phase
_MADE, _CODED = 9, 8  # from a header's last products, and a page's last coefficients
_ADDED, _CLEAR, _GIVEN = (
    5,
    6,
    14,
)  # from a block's last beat to its first score, between pages that are added up, to a score
_QUEUED = 256  # beats of lines that wait
