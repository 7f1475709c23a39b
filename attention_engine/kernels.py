"""Kernels that read pages in place: FP16 input, float32 accumulation, no copy of the keys and values.

There are N = sequences x KV heads streams, G query heads for each stream, d channels and S tokens; see
`csd_spec.KvSlotView`. A loaded row serves all G queries while it is in the L1 cache. Rows are prefetched one block in
advance, because the pages of a head are scattered and a hardware prefetcher cannot predict the next one.

The order of arithmetic is the same for any number of threads and on all machines. Approximate logits add channels in
ascending order, one fused multiply-add each. For the order of exact logits, see `_rows.dot`. Attention processes tokens
in ascending order, BLOCK at a time, with an online softmax (a running maximum; sums are rescaled when it grows). No
unselected value is ever loaded into an arithmetic unit; this is the function of the NFC filter.
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
    dot,
    dots_into,
    prefetch,
    untagged_address,
)
from attention_engine.decoded import has_loops, with_channels, with_tokens
from attention_engine.forms import Banks, EmbeddingForm
from attention_engine.logit_terms import apply_cap_and_bias
from csd_io.compiled import njit
from csd_spec import KvSlotView
from csd_spec.arrays import F32, I32, I64
from csd_spec.view import BANK_SHIFT, UNMAPPED

TokenSelection = tuple[I32, I64]  # tokens (N, k) and valid tokens of each stream (N,)
BLOCK = 16  # tokens of an online softmax step
PREFETCH_DISTANCE = 40  # distance in tokens between a prefetched row and the current row
RING = 64  # tokens with computed addresses; a power of two, at least BLOCK + PREFETCH_DISTANCE
LAST = RING - 1


@njit(inline="always")
def _page(place, slot):  # type: ignore[no-untyped-def]
    """Return the address of the page of a slot. place: `Banks`."""
    base = place.dram if slot >> np.uint32(BANK_SHIFT) else place.flash
    return base + np.uint64(slot & np.uint32((1 << BANK_SHIFT) - 1)) * place.page_bytes


@njit(inline="always")
def _eight(ring, first):  # type: ignore[no-untyped-def]
    """Return eight addresses of a ring from index `first`, a multiple of eight."""
    at = first & LAST
    return ring[at], ring[at + 1], ring[at + 2], ring[at + 3], ring[at + 4], ring[at + 5], ring[at + 6], ring[at + 7]


@njit(cache=True, nogil=True, error_model="numpy")
def _locate(  # type: ignore[no-untyped-def]
    place, k_slots, v_slots, tokens, stream, start, end, n, row_bytes, keys, values
):
    """Write the addresses of the rows of keys and values of tokens[stream, start:end], ascending, to two rings.

    Entries after the last token keep their previous, possibly uninitialized value. They are used for prefetches only.
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
    """Update the online softmax: convert the `size` logits of a block at `row` to weights under the new maximum.

    If the block raises the maximum, the previous sums of weights and of V are rescaled.
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
def _blend_v_mean(sums, total, share, v_mean):  # type: ignore[no-untyped-def]
    """Compute the output: sums over their total for the share of their weight, the mean of V for the rest."""
    for channel in range(sums.size):
        sums[channel] *= share / total
        if share < 1:
            sums[channel] += (1 - share) * v_mean[channel]


@njit(inline="always")
def _weight(total, share):  # type: ignore[no-untyped-def]
    """Return the sum of weights, relative to the maximum, that the output represents; 0 if it exceeds float32."""
    weight = total / share
    return weight if weight < np.inf else np.float32(0)


@njit(inline="always")
def _block_logits(keys, start, count, q_at, scale, d, weights):  # type: ignore[no-untyped-def]
    """Compute the logits of a block into weights (queries, BLOCK), -inf after the last token.

    q_at is the address of q (queries, d). Each widened row serves two queries. The loop also prefetches rows
    PREFETCH_DISTANCE tokens in advance.
    """
    queries, each, out, row = weights.shape[0], np.uint64(4 * d), np.uint64(weights.ctypes.data), np.uint64(4 * BLOCK)
    for i in range(0, count - 7, 8):
        prefetch(_eight(keys, start + i + PREFETCH_DISTANCE), 2 * d)
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
    """Add the weighted rows of V of a block to sums (queries, d) at an address, in the order of `_block_logits`."""
    queries, each, of, row = weights.shape[0], np.uint64(4 * d), np.uint64(weights.ctypes.data), np.uint64(4 * BLOCK)
    rows = np.uint64(values.ctypes.data) + np.uint64(8 * (start & LAST))  # a ring contains full blocks
    for i in range(0, count - 7, 8):
        prefetch(_eight(values, start + i + PREFETCH_DISTANCE), 2 * d)
    sums = sums_at
    for _ in range(queries // 2):
        add_many((sums, sums + each), (of, of + row), rows, count, d)
        sums, of = sums + each + each, of + row + row
    if queries % 2:
        add_many((sums,), (of,), rows, count, d)


@njit(cache=True, nogil=True, error_model="numpy")
def _attend(  # type: ignore[no-untyped-def]
    begin, end, place, k_slots, v_slots, n, q, tokens, counts, alpha, v_mean, logit_terms, out, rows
):
    """Compute attention of streams [begin, end) over their selected tokens, BLOCK at a time; see `attend`.

    For each block: addresses of the rows to prefetch, logits of eight rows at a time for two queries (remaining rows
    one at a time, and -inf after the last), softmax, then V for two queries with sums in registers. At the end, the
    sums are divided, the mean of V gets the share 1 - alpha, and m and l are written to `rows`.
    """
    _, queries, d = q.shape
    scale, row_bytes = np.float32(1 / math.sqrt(d)), place.row_bytes
    keys, values = np.zeros(RING, np.uint64), np.zeros(RING, np.uint64)
    weights = np.empty((queries, BLOCK), np.float32)
    tops, totals = np.empty(queries, np.float32), np.empty(queries, np.float32)
    q_at, weights_at, sums_at, each = q.ctypes.data, weights.ctypes.data, out.ctypes.data, 4 * d
    for stream in range(begin, end):
        length = counts[stream]
        tops[:], totals[:] = -np.inf, 0
        out[stream] = 0
        fetched = min(length, PREFETCH_DISTANCE)
        # int64, as below: a literal has a type of its own, for which numba would compile `_locate` again
        _locate(place, k_slots, v_slots, tokens, stream, np.int64(0), fetched, n, row_bytes, keys, values)
        for start in range(0, length, BLOCK):
            count = min(BLOCK, length - start)
            last, fetched = fetched, min(length, start + BLOCK + PREFETCH_DISTANCE)
            _locate(place, k_slots, v_slots, tokens, stream, last, fetched, n, row_bytes, keys, values)
            _block_logits(keys, start, count, np.uint64(q_at + stream * queries * each), scale, d, weights)
            for query in range(queries):
                if logit_terms is not None:
                    apply_cap_and_bias(
                        weights[query], logit_terms[stream, query], tokens[stream, start : start + count]
                    )
                row = np.uint64(weights_at + 4 * BLOCK * query)
                _rescale(row, BLOCK, tops, totals, query, out[stream, query])
            _block_values(values, start, count, np.uint64(sums_at + stream * queries * each), d, weights)
        for query in range(queries):
            _blend_v_mean(out[stream, query], totals[query], alpha[stream, query], v_mean[stream])
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
    """Add weights[i] * code of chosen channel i to the sums; return the sum of the minimums, to add to each sum."""
    m, bits, run_bytes = form.m, form.bits, form.run_bytes
    ones = np.ones(1, np.float32)
    one, offset = np.uint64(ones.ctypes.data), np.float32(0)
    for i in range(weights.size):
        page, row = _page(place, e_slots[stream, chosen[stream, i] // m, group]), chosen[stream, i] % m
        scale_at, least_at = page + np.uint64(2 * row), page + np.uint64(2 * (m + row))
        weight = weights[i] * dot(one, scale_at, 1)
        offset += weights[i] * dot(one, least_at, 1)
        codes = untagged_address(page) + np.uint64(form.scale_bytes + row * run_bytes)
        for part in range(8 // bits):
            add_codes(sums + np.uint64(4 * part * run_bytes), weight, codes, part * bits, bits, run_bytes)
    return offset


@njit(cache=True, nogil=True, error_model="numpy")
def _score_rows(place, k_slots, stream, first, n, chosen, weights, sums, count):  # type: ignore[no-untyped-def]
    """Add weights[i] * chosen channel i of `count` rows of K to the sums, for a group without embedding pages."""
    for t in range(count):
        row = _page(place, k_slots[stream, (first + t) // n]) + np.uint64((first + t) % n) * place.row_bytes
        for i in range(weights.size):
            add_value(sums + np.uint64(4 * t), weights[i], row, chosen[stream, i])


@njit(cache=True, nogil=True, error_model="numpy")
def _approximate(begin, end, place, e_slots, k_slots, seq_lens, form, q, channels, out):  # type: ignore[no-untyped-def]
    """Compute logits of streams [begin, end) from the chosen channels; for the arguments, see `approximate`.

    form: `EmbeddingForm`. The weights of a query are its chosen channels over sqrt(d x their share of |q|), so that
    logits have the scale of exact logits. If the share is 0, the logits are 0. The data of a group decide how it is
    scored: FP16 runs, codes with scales or, without embedding pages, rows of K.
    """
    _, queries, d = q.shape
    T, r = form.T, channels.shape[1]
    weights = np.empty(r, np.float32)
    out_at = out.ctypes.data
    for stream in range(begin, end):
        length = seq_lens[stream]
        for query in range(queries):
            whole, chosen = np.float32(0), np.float32(0)
            for channel in range(d):
                whole += abs(q[stream, query, channel])
            for i in range(r):
                chosen += abs(q[stream, query, channels[stream, i]])
            scale = np.float32(1 / math.sqrt(d * (chosen / whole if chosen > 0 else np.float32(1))))
            for i in range(r):
                weights[i] = q[stream, query, channels[stream, i]] * scale
            out[stream, query, :length] = 0
            logits = np.uint64(out_at + 4 * ((stream * queries + query) * out.shape[2]))
            for group in range((length + T - 1) // T):
                first = group * T
                count, sums = min(T, length - first), logits + np.uint64(4 * first)
                if e_slots[stream, 0, group] == UNMAPPED:
                    _score_rows(place, k_slots, stream, first, form.n, channels, weights, sums, count)
                elif form.bits < 16:
                    offset = _score_codes(place, e_slots, stream, group, form, channels, weights, sums)
                    for t in range(first, first + T):
                        out[stream, query, t] += offset
                else:
                    _score_runs(place, e_slots, stream, group, form.m, form.run_bytes, channels, weights, sums, count)


@njit(cache=True, nogil=True, error_model="numpy")
def _exact(begin, end, place, k_slots, n, q, tokens, counts, out):  # type: ignore[no-untyped-def]
    _, queries, d = q.shape
    scale, q_at = np.float32(1 / math.sqrt(d)), q.ctypes.data
    for stream in range(begin, end):
        out[stream] = -np.inf
        for i in range(counts[stream]):
            token = tokens[stream, i]
            row = _page(place, k_slots[stream, token // n]) + np.uint64(token % n) * place.row_bytes
            for query in range(queries):
                q_row = np.uint64(q_at + (stream * queries + query) * 4 * d)
                out[stream, query, i] = scale * dot(q_row, row, d)


def _place(view: KvSlotView) -> Banks:
    """Return the location of a view's pages."""
    banks, place = view.kept.get("place", (None, None))
    if banks is not view.banks:
        flash, dram = view.banks
        if flash.shape[1] != dram.shape[1] or not (flash.flags.c_contiguous and dram.flags.c_contiguous):
            raise ValueError("banks: pages of one size, each contiguous, are needed")
        tag = view.layout.rows.tag
        assert tag is not None, f"codec {view.layout.rows.name}: its pages are decoded first"
        first, second = (bank.__array_interface__["data"][0] | tag << TAG_SHIFT for bank in view.banks)
        place = Banks(*map(np.uint64, (first, second, 2 * flash.shape[1], view.layout.row_bytes)))
        view.kept["place"] = view.banks, place
    return place  # type: ignore[no-any-return]  # `kept` is untyped


@njit(cache=True, nogil=True)
def _fault(tokens, counts, seq_lens):  # type: ignore[no-untyped-def]
    """Return the error of a selection: 0 no error, 1 wrong counts, 2 token out of range."""
    for stream in range(counts.size):
        count = counts[stream]
        if count < 0 or count > tokens.shape[1]:
            return 1
        if count and tokens[stream, count - 1] >= seq_lens[stream]:
            return 2
    return 0


def _check_selection(view: KvSlotView, tokens: I32, counts: I64) -> None:
    """Check the selection. Kernels use unchecked addresses, so a wrong token would read arbitrary memory."""
    streams = view.seq_lens.size
    assert tokens.shape[0] == counts.size == streams, f"a selection of {tokens.shape[0]} streams, there are {streams}"
    fault = _fault(tokens, counts, view.seq_lens)
    assert fault != 1, "more tokens are counted than are selected"
    assert fault != 2, "a token beyond the end of its stream is selected"


def approximate(view: KvSlotView, q: F32, channels: I32, threads: int = 1) -> F32:
    """Compute logits from selected channels of the embedding-indexed copy of K (Algorithm 1, steps 2 to 4).

    Args:
        view: Slots of N streams.
        q: Queries, (N, G, d) float32.
        channels: Selected channels, (N, r), ascending.
        threads: Number of threads for the streams.

    Returns:
        Logits, (N, G, max S) float32; undefined after the end of a stream.
    """
    assert channels.shape[0] == view.seq_lens.size and 0 <= channels.min() <= channels.max() < q.shape[2]
    out: F32 = np.empty((*q.shape[:2], int(view.seq_lens.max())), np.float32)
    view = view if has_loops(view) else with_channels(view, channels)
    lay = view.layout
    form = EmbeddingForm(lay.m, lay.T, lay.n, lay.bits, lay.scale_bytes, lay.run_bytes)
    arguments = _place(view), view.e_slots, view.k_slots, view.seq_lens, form, np.ascontiguousarray(q), channels, out
    over_streams(_approximate, threads, q.shape[0], arguments)
    return out


def exact(view: KvSlotView, q: F32, tokens: I32, counts: I64, threads: int = 1) -> F32:
    """Compute logits of tokens (N, k) from their full rows of K; counts (N,) of them are valid, -inf follows.

    q: (N, G, d) float32. Returns (N, G, k) float32.
    """
    _check_selection(view, tokens, counts)
    view = view if has_loops(view) else with_tokens(view, tokens, counts)
    out: F32 = np.empty((*q.shape[:2], tokens.shape[1]), np.float32)
    arguments = _place(view), view.k_slots, view.layout.n, np.ascontiguousarray(q), tokens, counts, out
    over_streams(_exact, threads, q.shape[0], arguments)
    return out


def attend(
    view: KvSlotView,
    q: F32,
    chosen: TokenSelection,
    alpha: F32,
    v_mean: F32,
    logit_terms: F32 | None = None,
    threads: int = 1,
) -> tuple[F32, F32]:
    """Compute softmax attention over selected tokens; the mean of V represents the missing weight (steps 8 to 11).

    Args:
        view: Slots of N streams.
        q: Queries, (N, G, d) float32.
        chosen: Tokens (N, k), ascending, and valid tokens of each stream (N,).
        alpha: Share of the weight of the selected tokens, (N, G).
        v_mean: Mean of V, (N, d); used only if alpha < 1.
        logit_terms: See `LogitTerms`.
        threads: Number of threads for the streams.

    Returns:
        The output (N, G, d) float32, and rows (N, G, 2) float32: m, the largest logit, and l, the sum of e^(logit - m)
        over alpha. l is 0 if it exceeds float32; without tokens, m is -inf and l is 0.
    """
    _check_selection(view, *chosen)
    view = view if has_loops(view) else with_tokens(view, *chosen)
    assert alpha.shape == q.shape[:2] and v_mean.shape == (q.shape[0], q.shape[2])
    out: F32 = np.empty(q.shape, np.float32)
    rows: F32 = np.empty((*q.shape[:2], 2), np.float32)
    slots = view.k_slots, view.v_slots, np.uint64(view.layout.n)
    arguments = _place(view), *slots, np.ascontiguousarray(q), *chosen, alpha, v_mean, logit_terms, out, rows
    over_streams(_attend, threads, q.shape[0], arguments)
    return out, rows
