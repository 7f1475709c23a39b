"""Kernels over pages where they lie: FP16 in, FP32 accumulate, no copy of K or V.

Streams N = sequences x KV heads, G query heads share a stream, d channels, S tokens; see `csd_spec.KvView`. A loaded
row serves all G queries while it is in the first cache. Rows are asked for a block ahead: pages of one head lie
anywhere, and no hardware foresees the next.

Order of arithmetic, the same for any number of threads and on any machine. Approximate logits add channels in
ascending order, one fused multiply-add each. Exact logits add as `_rows.dot` says. Attention takes tokens in ascending
order, BLOCK at a time, with an online softmax (a running maximum; sums shrink when it grows). Nothing that was not
selected is ever loaded into an arithmetic unit: that is the NFC filter.
"""

from __future__ import annotations

import math

import numpy as np

from attention_engine._exp import exp, exponentials, largest
from attention_engine._parallel import over_streams
from attention_engine._rows import (
    TAG_SHIFT,
    add_codes,
    add_many,
    add_scaled,
    add_value,
    ask,
    bare,
    dot,
    dots_into,
)
from attention_engine.decoded import has_loops, with_channels, with_tokens
from attention_engine.terms import bend
from csd_io.compiled import njit
from csd_spec import KvView
from csd_spec.arrays import F32, I32, I64
from csd_spec.view import BANK_SHIFT, UNMAPPED

Chosen = tuple[I32, I64]  # tokens (N, k), of which counts (N,) are used
BLOCK = 16  # tokens of an online softmax step
AHEAD = 40  # tokens whose rows are asked for in advance
RING = 64  # tokens whose addresses are known; a power of two, at least BLOCK + AHEAD
LAST = RING - 1


@njit(inline="always")
def _page(place, slot):  # type: ignore[no-untyped-def]
    """Address of a slot's page. place: addresses of both banks, bytes of a page and of a row."""
    flash, dram, page_bytes, _ = place
    base = dram if slot >> np.uint32(BANK_SHIFT) else flash
    return base + np.uint64(slot & np.uint32((1 << BANK_SHIFT) - 1)) * page_bytes


@njit(inline="always")
def _eight(ring, first):  # type: ignore[no-untyped-def]
    """Eight addresses of a ring, from one on that eight divides."""
    at = first & LAST
    return ring[at], ring[at + 1], ring[at + 2], ring[at + 3], ring[at + 4], ring[at + 5], ring[at + 6], ring[at + 7]


@njit(cache=True, nogil=True, error_model="numpy")
def _locate(  # type: ignore[no-untyped-def]
    place, k_slots, v_slots, tokens, stream, start, end, n, row_bytes, keys, values
):
    """Addresses of the rows of K and V of tokens[stream, start:end], ascending, into two rings.

    Behind the last of all a ring still holds what was there before, or nothing. That is good enough to ask for.
    """
    first = k_page = v_page = np.uint64(0)
    for i in range(start, end):
        token = np.uint64(tokens[stream, i])
        if token - first >= n or i == start:
            group = np.uint32(token) // np.uint32(n)
            first = np.uint64(group) * n
            k_page = _page(place, k_slots[stream, group])
            v_page = _page(place, v_slots[stream, group])
        keys[i & LAST] = k_page + (token - first) * row_bytes
        values[i & LAST] = v_page + (token - first) * row_bytes


@njit(inline="always")
def _rescale(row, size, tops, totals, query, out_row):  # type: ignore[no-untyped-def]
    """Online softmax: turn a block's `size` logits, at address `row`, into weights under the maximum so far.

    Where the block raises the maximum, the sums of weights and of V from before shrink to it.
    """
    top = max(tops[query], largest(row, size))
    if top > tops[query]:
        shrink = exp(tops[query] - top)
        totals[query] *= shrink
        for channel in range(out_row.size):
            out_row[channel] *= shrink
        tops[query] = top
    totals[query] += exponentials(row, size, top)


@njit(inline="always")
def _mix(sums, total, share, v_mean):  # type: ignore[no-untyped-def]
    """The output: sums over their total for its share of the weight, the mean of V for the rest."""
    for channel in range(sums.size):
        sums[channel] *= share / total
        if share < 1:
            sums[channel] += (1 - share) * v_mean[channel]


@njit(inline="always")
def _weight(total, share):  # type: ignore[no-untyped-def]
    """Of a row's weights under its maximum, the sum that the output stands for; 0 where a share of almost nothing
    leaves FP32 no number for it."""
    weight = total / share
    return weight if weight < np.inf else np.float32(0)


@njit(inline="always")
def _block_logits(keys, start, count, q_at, scale, d, weights):  # type: ignore[no-untyped-def]
    """Logits of a block's tokens into weights (queries, BLOCK), -inf behind the last. q_at: address of q (queries, d).

    Two queries at a time, for which a row is widened once; rows AHEAD are asked for.
    """
    queries, each, out, row = weights.shape[0], np.uint64(4 * d), np.uint64(weights.ctypes.data), np.uint64(4 * BLOCK)
    for i in range(0, count - 7, 8):
        ask(_eight(keys, start + i + AHEAD), 2 * d)
        some, at = _eight(keys, start + i), out + np.uint64(4 * i)
        q = q_at
        for _ in range(queries // 2):
            dots_into((at, at + row), scale, (q, q + each), some, d)
            q, at = q + each + each, at + row + row
        if queries % 2:
            dots_into((at,), scale, (q,), some, d)
    for query in range(queries):
        for i in range(count // 8 * 8, count):
            weights[query, i] = scale * dot(q_at + query * each, keys[(start + i) & LAST], d)
        for i in range(count, BLOCK):
            weights[query, i] = -np.inf


@njit(inline="always")
def _block_values(values, start, count, sums_at, d, weights):  # type: ignore[no-untyped-def]
    """Add a block's rows of V by their weights to sums (queries, d) at an address, as `_block_logits` goes."""
    queries, each, of, row = weights.shape[0], np.uint64(4 * d), np.uint64(weights.ctypes.data), np.uint64(4 * BLOCK)
    rows = np.uint64(values.ctypes.data) + np.uint64(8 * (start & LAST))  # a ring holds whole blocks
    for i in range(0, count - 7, 8):
        ask(_eight(values, start + i + AHEAD), 2 * d)
    sums = sums_at
    for _ in range(queries // 2):
        add_many((sums, sums + each), (of, of + row), rows, count, d)
        sums, of = sums + each + each, of + row + row
    if queries % 2:
        add_many((sums,), (of,), rows, count, d)


@njit(cache=True, nogil=True, error_model="numpy")
def _attend(  # type: ignore[no-untyped-def]
    begin, end, place, k_slots, v_slots, n, q, tokens, counts, alpha, v_mean, bends, out, rows
):
    """Attention of streams [begin, end) over their selected tokens, BLOCK at a time; arguments as in `attend`.

    Of each block: the addresses of the rows AHEAD, logits of eight rows at a time for two queries (those that are left
    one by one, and -inf behind the last), the softmax, then V for two queries, whose sums stay in registers. In the end
    the sums are divided, the mean of V takes the share 1 - alpha, and `rows` get m and l.
    """
    _, queries, d = q.shape
    scale, row_bytes = np.float32(1 / math.sqrt(d)), place[3]
    keys, values = np.zeros(RING, np.uint64), np.zeros(RING, np.uint64)
    weights = np.empty((queries, BLOCK), np.float32)
    tops, totals = np.empty(queries, np.float32), np.empty(queries, np.float32)
    q_at, weights_at, sums_at, each = q.ctypes.data, weights.ctypes.data, out.ctypes.data, 4 * d
    for stream in range(begin, end):
        length = counts[stream]
        tops[:], totals[:] = -np.inf, 0
        out[stream] = 0
        known = min(length, AHEAD)
        _locate(place, k_slots, v_slots, tokens, stream, 0, known, n, row_bytes, keys, values)
        for start in range(0, length, BLOCK):
            count = min(BLOCK, length - start)
            last, known = known, min(length, start + BLOCK + AHEAD)
            _locate(place, k_slots, v_slots, tokens, stream, last, known, n, row_bytes, keys, values)
            _block_logits(keys, start, count, np.uint64(q_at + stream * queries * each), scale, d, weights)
            for query in range(queries):
                if bends is not None:
                    bend(weights[query], bends[stream, query], tokens[stream, start : start + count])
                row = np.uint64(weights_at + 4 * BLOCK * query)
                _rescale(row, BLOCK, tops, totals, query, out[stream, query])
            _block_values(values, start, count, np.uint64(sums_at + stream * queries * each), d, weights)
        for query in range(queries):
            _mix(out[stream, query], totals[query], alpha[stream, query], v_mean[stream])
            rows[stream, query, 0] = tops[query]
            rows[stream, query, 1] = _weight(totals[query], alpha[stream, query])


@njit(cache=True, nogil=True, error_model="numpy")
def _score_runs(place, e_slots, stream, group, m, run_bytes, chosen, weights, sums, count):  # type: ignore[no-untyped-def]
    """Add weights[i] * chosen channel i of an embedding group to `count` sums."""
    r = weights.size
    runs = np.empty(r, np.uint64)
    for i in range(r):
        page = _page(place, e_slots[stream, chosen[stream, i] // m, group])
        runs[i] = page + np.uint64(chosen[stream, i] % m * run_bytes)
    for i in range(0, r - 3, 4):
        some = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        add_scaled(sums, some, (runs[i], runs[i + 1], runs[i + 2], runs[i + 3]), count)
    for i in range(r // 4 * 4, r):
        add_scaled(sums, (weights[i],), (runs[i],), count)


@njit(cache=True, nogil=True, error_model="numpy")
def _score_codes(place, e_slots, stream, group, form, chosen, weights, sums):  # type: ignore[no-untyped-def]
    """The same for codes of few bits, but for what the least values add to every sum, which is returned."""
    m, _, _, bits, scale_bytes, run_bytes = form
    ones = np.ones(1, np.float32)
    one, offset = np.uint64(ones.ctypes.data), np.float32(0)
    for i in range(weights.size):
        page, row = _page(place, e_slots[stream, chosen[stream, i] // m, group]), chosen[stream, i] % m
        scale_at, least_at = page + np.uint64(2 * row), page + np.uint64(2 * (m + row))
        weight = weights[i] * dot(one, scale_at, 1)
        offset += weights[i] * dot(one, least_at, 1)
        codes = bare(page) + np.uint64(scale_bytes + row * run_bytes)
        for part in range(8 // bits):
            add_codes(sums + np.uint64(4 * part * run_bytes), weight, codes, part * bits, bits, run_bytes)
    return offset


@njit(cache=True, nogil=True, error_model="numpy")
def _score_rows(place, k_slots, stream, first, n, chosen, weights, sums, count):  # type: ignore[no-untyped-def]
    """The same from the token pages of K, where a group has no embedding pages."""
    for t in range(count):
        row = _page(place, k_slots[stream, (first + t) // n]) + np.uint64((first + t) % n) * place[3]
        for i in range(weights.size):
            add_value(sums + np.uint64(4 * t), weights[i], row, chosen[stream, i])


@njit(cache=True, nogil=True, error_model="numpy")
def _approximate(begin, end, place, e_slots, k_slots, seq_lens, form, q, channels, out):  # type: ignore[no-untyped-def]
    """Logits of streams [begin, end) from the chosen channels; arguments as in `approximate`.

    form: m, T, n, bits, bytes of scales and of a run of the layout. A query's weights are its chosen channels over
    sqrt(d x the share of |q| that they are), so that logits have the scale of exact ones; a query without any of that
    share has logits of 0. A group is scored by what it has: runs of FP16, codes with scales, or, without embedding
    pages, the rows of K.
    """
    _, queries, d = q.shape
    m, T, n, bits, _, run_bytes = form
    r = channels.shape[1]
    weights = np.empty(r, np.float32)
    out_at = out.ctypes.data
    for stream in range(begin, end):
        length = seq_lens[stream]
        for query in range(queries):
            whole, kept = np.float32(0), np.float32(0)
            for channel in range(d):
                whole += abs(q[stream, query, channel])
            for i in range(r):
                kept += abs(q[stream, query, channels[stream, i]])
            scale = np.float32(1 / math.sqrt(d * (kept / whole if kept > 0 else np.float32(1))))
            for i in range(r):
                weights[i] = q[stream, query, channels[stream, i]] * scale
            out[stream, query, :length] = 0
            logits = np.uint64(out_at + 4 * ((stream * queries + query) * out.shape[2]))
            for group in range((length + T - 1) // T):
                first = group * T
                count, sums = min(T, length - first), logits + np.uint64(4 * first)
                if e_slots[stream, 0, group] == UNMAPPED:
                    _score_rows(place, k_slots, stream, first, n, channels, weights, sums, count)
                elif bits < 16:
                    offset = _score_codes(place, e_slots, stream, group, form, channels, weights, sums)
                    for t in range(first, first + T):
                        out[stream, query, t] += offset
                else:
                    _score_runs(place, e_slots, stream, group, m, run_bytes, channels, weights, sums, count)


@njit(cache=True, nogil=True, error_model="numpy")
def _exact(begin, end, place, k_slots, n, q, tokens, counts, out):  # type: ignore[no-untyped-def]
    _, queries, d = q.shape
    scale, q_at = np.float32(1 / math.sqrt(d)), q.ctypes.data
    for stream in range(begin, end):
        out[stream] = -np.inf
        for i in range(counts[stream]):
            token = tokens[stream, i]
            row = _page(place, k_slots[stream, token // n]) + np.uint64(token % n) * place[3]
            for query in range(queries):
                q_row = np.uint64(q_at + (stream * queries + query) * 4 * d)
                out[stream, query, i] = scale * dot(q_row, row, d)


def _place(view: KvView) -> tuple[np.uint64, ...]:
    """Addresses of both banks, which say what rows are of, and the bytes of a page and of a row."""
    banks, place = view.kept.get("place", (None, None))
    if banks is not view.banks:
        flash, dram = view.banks
        if flash.shape[1] != dram.shape[1] or not (flash.flags.c_contiguous and dram.flags.c_contiguous):
            raise ValueError("banks: pages of one size, each contiguous, are needed")
        tag = view.layout.rows.tag
        assert tag is not None, f"codec {view.layout.rows.name}: its pages are decoded first"
        first, second = (bank.__array_interface__["data"][0] | tag << TAG_SHIFT for bank in view.banks)
        place = np.uint64(first), np.uint64(second), np.uint64(2 * flash.shape[1]), np.uint64(view.layout.row_bytes)
        view.kept["place"] = view.banks, place
    return place  # type: ignore[no-any-return]  # what is kept has no type


@njit(cache=True, nogil=True)
def _fault(tokens, counts, seq_lens):  # type: ignore[no-untyped-def]
    """What is wrong with a selection: 0 nothing, 1 its counts, 2 its last tokens."""
    for stream in range(counts.size):
        count = counts[stream]
        if count < 0 or count > tokens.shape[1]:
            return 1
        if count and tokens[stream, count - 1] >= seq_lens[stream]:
            return 2
    return 0


def _check_selection(view: KvView, tokens: I32, counts: I64) -> None:
    """Kernels follow addresses: a token that is not there would be read from anywhere."""
    streams = view.seq_lens.size
    assert tokens.shape[0] == counts.size == streams, f"a selection of {tokens.shape[0]} streams, there are {streams}"
    fault = _fault(tokens, counts, view.seq_lens)
    assert fault != 1, "more tokens are counted than are selected"
    assert fault != 2, "a token beyond the end of its stream is selected"


def approximate(view: KvView, q: F32, channels: I32, threads: int = 1) -> F32:
    """Logits from selected channels of embedding-indexed K (Algorithm 1, steps 2 to 4).

    q: (N, G, d) float32; channels: (N, r) ascending. Returns (N, G, max S) float32; beyond a stream's length
    undefined.
    """
    assert channels.shape[0] == view.seq_lens.size and 0 <= channels.min() <= channels.max() < q.shape[2]
    out: F32 = np.empty((*q.shape[:2], int(view.seq_lens.max())), np.float32)
    view = view if has_loops(view) else with_channels(view, channels)
    lay = view.layout
    form = lay.m, lay.T, lay.n, lay.bits, lay.scale_bytes, lay.run_bytes
    arguments = _place(view), view.e_slots, view.k_slots, view.seq_lens, form, np.ascontiguousarray(q), channels, out
    over_streams(_approximate, threads, q.shape[0], arguments)
    return out


def exact(view: KvView, q: F32, tokens: I32, counts: I64, threads: int = 1) -> F32:
    """Logits of tokens (N, k), of which counts (N,) are used, from their whole rows of K; -inf behind them.

    q: (N, G, d) float32. Returns (N, G, k) float32.
    """
    _check_selection(view, tokens, counts)
    view = view if has_loops(view) else with_tokens(view, tokens, counts)
    out: F32 = np.empty((*q.shape[:2], tokens.shape[1]), np.float32)
    arguments = _place(view), view.k_slots, view.layout.n, np.ascontiguousarray(q), tokens, counts, out
    over_streams(_exact, threads, q.shape[0], arguments)
    return out


def attend(
    view: KvView, q: F32, chosen: Chosen, alpha: F32, v_mean: F32, bends: F32 | None = None, threads: int = 1
) -> tuple[F32, F32]:
    """Softmax attention over selected tokens, mixed with the mean of V by the weight they miss (steps 8 to 11).

    q: (N, G, d) float32; chosen: tokens (N, k) ascending, of which counts (N,) are used; alpha: (N, G); v_mean: (N, d),
    read where alpha < 1; bends: see `Terms`. Returns the output (N, G, d) float32, and rows (N, G, 2) float32: m, the
    largest logit, and l, the sum of e^(logit - m) over alpha; l = 0 where that is beyond FP32, and of no tokens m is
    -inf and l = 0.
    """
    _check_selection(view, *chosen)
    view = view if has_loops(view) else with_tokens(view, *chosen)
    assert alpha.shape == q.shape[:2] and v_mean.shape == (q.shape[0], q.shape[2])
    out: F32 = np.empty(q.shape, np.float32)
    rows: F32 = np.empty((*q.shape[:2], 2), np.float32)
    slots = view.k_slots, view.v_slots, np.uint64(view.layout.n)
    arguments = _place(view), *slots, np.ascontiguousarray(q), *chosen, alpha, v_mean, bends, out, rows
    over_streams(_attend, threads, q.shape[0], arguments)
    return out, rows
