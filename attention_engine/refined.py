"""Attention by K and V in 8 bits, in refined pages where they lie (`csd_spec.progressive`).

A run is tokens of one group that follow each other: rows of codes, or of FP16 or BF16 where the group is not full yet.
"""

from __future__ import annotations

import math

import numpy as np

from attention_engine._parallel import over_streams
from attention_engine._rows import add_scaled, ask, bare, dot
from attention_engine._runs import add_code_run, dot_codes, powers_of
from attention_engine.kernels import BLOCK, Chosen, _check_selection, _page, _place, _rescale
from attention_engine.terms import bend
from csd_io.compiled import njit
from csd_spec import KvView
from csd_spec.arrays import F32
from csd_spec.progressive import Progressive
from csd_spec.view import UNMAPPED


@njit(inline="always")
def _at(array):  # type: ignore[no-untyped-def]
    """Its address."""
    return np.uint64(array.ctypes.data)


@njit(inline="always")
def _four(at, stride):  # type: ignore[no-untyped-def]
    """Addresses of four rows."""
    return at, at + stride, at + np.uint64(2) * stride, at + np.uint64(3) * stride


@njit(cache=True, nogil=True, error_model="numpy")
def _logits(q, scale, run, following, weights):  # type: ignore[no-untyped-def]
    """Logits of a run's rows of K for q (G, d) into weights (G, ...), -inf behind them up to a multiple of BLOCK.

    run: address of its first row, how many there are, whether they are codes. following: address and bytes of what is
    needed next, asked for meanwhile.
    """
    (at, count, coded), (queries, d), each = run, q.shape, np.uint64(4 * q.shape[1])
    part, together = (following[1] + count - 1) // count, queries // 4 * 4 if coded else 0
    for i in range(count):
        ask((following[0] + np.uint64(i * part),), part)
        row = at + np.uint64(i * d if coded else 2 * i * d)
        for first in range(0, together, 4):
            some = dot_codes(_four(_at(q) + np.uint64(first) * each, each), row, d)
            for j in range(4):
                weights[first + j, i] = scale * some[j]
        for query in range(together, queries):
            one = _at(q) + np.uint64(query) * each
            weights[query, i] = scale * (dot_codes((one,), row, d)[0] if coded else dot(one, row, d))
    for query in range(queries):
        for i in range(count, (count + BLOCK - 1) // BLOCK * BLOCK):
            weights[query, i] = -np.inf


@njit(cache=True, nogil=True, error_model="numpy")
def _add_values(sums, weights, run, scales):  # type: ignore[no-untyped-def]
    """Add a run's rows of V, weighted, to sums (Q, d), each code times its channel's scale (d,). run: see `_logits`."""
    (at, count, coded), (queries, d), first = run, sums.shape, 0
    each, width, scales_at = np.uint64(4 * d), np.uint64(4 * weights.shape[1]), _at(scales)
    while first < queries:
        s, w, left = _at(sums) + np.uint64(first) * each, _at(weights) + np.uint64(first) * width, queries - first
        if not coded:
            for i in range(count):
                add_scaled(s, (weights[first, i],), (at + np.uint64(2 * i * d),), d)
            first += 1
        elif left >= 4:
            add_code_run(_four(s, each), _four(w, width), at, count, scales_at, d)
            first += 4
        else:
            add_code_run((s,), (w,), at, count, scales_at, d)
            first += 1


@njit(cache=True, nogil=True, error_model="numpy")
def _open_run(place, pages, slots, tokens, form, part, scales):  # type: ignore[no-untyped-def]
    """K (part 0) or V (the last part) of tokens [first, last) of one group as a run; scales (d,) become those of its
    channels. form: tokens of a page, its parts, and tokens of one buffer of a group that is not full."""
    (first, last), d, (n, parts, waiting) = tokens, scales.size, form
    group, row = first // n, first % n
    if pages[group] == UNMAPPED:
        scales[:] = 1
        slot = slots[group * ((n + waiting - 1) // waiting) + row // waiting]
        return _page(place, slot) + np.uint64(2 * (row % waiting) * d), last - first, False
    at = bare(_page(place, pages[group]))
    powers_of(_at(scales), at + np.uint64(part * d), d)
    return at + np.uint64((parts + part * n + row) * d), last - first, True


@njit(cache=True, nogil=True)
def _scale(q, scales, out):  # type: ignore[no-untyped-def]
    """q (G, d) times scales (d,)."""
    for query in range(q.shape[0]):
        for channel in range(q.shape[1]):
            out[query, channel] = q[query, channel] * scales[channel]


@njit(cache=True, nogil=True, error_model="numpy")
def score_rows(place, k_slots, pages, run_form, q, tokens, out):  # type: ignore[no-untyped-def]
    """Exact logits (G, S) of tokens [first, last) from their rows of K, in 8 bits or as they came."""
    (queries, d), (first, last), (n, _, waiting) = q.shape, tokens, run_form
    scales, keys = np.empty(d, np.float32), np.empty((queries, d), np.float32)
    weights = np.empty((queries, (n + BLOCK - 1) // BLOCK * BLOCK), np.float32)
    while first < last:
        end = min(last, (first // n + 1) * n, first + waiting - first % n % waiting)
        run = _open_run(place, pages, k_slots, (first, end), run_form, 0, scales)
        _scale(q, scales, keys)
        _logits(keys, np.float32(1 / math.sqrt(d)), run, (np.uint64(0), 0), weights)
        out[:, first:end] = weights[:, : end - first]
        first = end


@njit(inline="always")
def _run_end(tokens, first, length, n, waiting):  # type: ignore[no-untyped-def]
    """Where the tokens of one group that follow each other end, or of one buffer of it."""
    last = first + 1
    while last < length and tokens[last] == tokens[last - 1] + 1 and tokens[last] % n % waiting:
        last += 1
    return last


@njit(cache=True, nogil=True, error_model="numpy")
def _attend_refined(begin, end, place, pages, slots, form, q, tokens, counts, bends, out, rows):  # type: ignore[no-untyped-def]
    """Attention of streams [begin, end), a run at a time: K is scored for all queries, then V is added.

    The page of the run behind is asked for meanwhile.
    """
    (_, queries, d), (n, parts, waiting) = q.shape, form
    scale, width = np.float32(1 / math.sqrt(d)), (n + BLOCK - 1) // BLOCK * BLOCK
    scales, keys = np.empty(d, np.float32), np.empty((queries, d), np.float32)
    weights = np.ones((queries, width), np.float32)
    tops, totals = np.empty(queries, np.float32), np.empty(queries, np.float32)
    for stream in range(begin, end):
        sums = out[stream]
        tops[:], totals[:], sums[:] = -np.inf, 0, 0
        mine, groups, k_slots, v_slots = tokens[stream], pages[stream], slots[0][stream], slots[1][stream]
        asking, length, first = q[stream], counts[stream], 0
        while first < length:
            last = _run_end(mine, first, length, n, waiting)
            behind = groups[mine[last] // n] if last < length else UNMAPPED
            following = _page(place, behind) if behind != UNMAPPED else np.uint64(0)
            size = np.int64(place[2]) if behind != UNMAPPED else 0
            taken = mine[first], mine[first] + (last - first)
            run = _open_run(place, groups, k_slots, taken, form, 0, scales)
            _scale(asking, scales, keys)
            _logits(keys, scale, run, (following, size), weights)
            for query in range(queries):
                if bends is not None:
                    bend(weights[query], bends[stream, query], mine[first:last])
                _rescale(_at(weights[query]), (run[1] + BLOCK - 1) // BLOCK * BLOCK, tops, totals, query, sums[query])
            _add_values(sums, weights, _open_run(place, groups, v_slots, taken, form, parts - 1, scales), scales)
            first = last
        for query in range(queries):
            for channel in range(d):
                sums[query, channel] = sums[query, channel] / totals[query] if length else np.float32(0)
            rows[stream, query, 0], rows[stream, query, 1] = tops[query], totals[query]


def progressive_form(view: KvView) -> Progressive:
    """The form of the layout's pages; raises ValueError for a layout of one precision."""
    form = view.layout.progressive
    if form is None:
        raise ValueError("K and V are not kept in few bits in this layout: use one that does, such as progressive")
    return form


def attend_refined(view: KvView, q: F32, chosen: Chosen, bends: F32 | None = None, threads: int = 1) -> tuple[F32, F32]:
    """Attention over some tokens, by K and V in 8 bits where a group is full.

    Args:
        view: Where K and V lie.
        q: Queries, (N, G, d) float32.
        chosen: Tokens (N, k), ascending, of which counts (N,) are attended.
        bends: What a model does with logits (`Terms.bends`).
        threads: That share the streams.

    Returns:
        The output, (N, G, d) float32, and m and l of each row, (N, G, 2) float32; m is -inf where a stream has none.
    """
    form = progressive_form(view)
    _check_selection(view, *chosen)
    out: F32 = np.empty(q.shape, np.float32)
    rows: F32 = np.empty((*q.shape[:2], 2), np.float32)
    places = _place(view), view.maps["refined"][:, 0], (view.k_slots, view.v_slots), (form.n, form.parts, form.waiting)
    over_streams(_attend_refined, threads, q.shape[0], (*places, np.ascontiguousarray(q), *chosen, bends, out, rows))
    return out, rows
