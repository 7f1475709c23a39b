"""Kernels over pages of progressive precision (`csd_spec.planes`): scores straight from the planes, and attention by
K and V in 8 bits where they lie.

A logit is offset + unit x an integer: of each page and query, what planes add is rounded to multiples of a unit, so
that any four of them add `LARGEST` units at most. A run is tokens of one group that follow each other: rows of codes,
or of FP16 or BF16 where the group is not full yet.
"""

from __future__ import annotations

import math

import numpy as np

from attention_engine._nibbles import QUERIES, ROW_BYTES, add_entries, fill_entries, fill_tables
from attention_engine._parallel import over_streams
from attention_engine._rows import add_scaled, ask, bare, dot
from attention_engine._runs import add_code_run, dot_codes, powers_of
from attention_engine.kernels import BLOCK, Chosen, _check_selection, _mix, _page, _place, _rescale, _weight
from attention_engine.terms import bend
from csd_io.compiled import njit
from csd_spec import KvView
from csd_spec.arrays import F32
from csd_spec.planes import MAX_WIDTH, Planes
from csd_spec.view import UNMAPPED

LINE = 32  # tokens that are scored at once


@njit(inline="always")
def _at(array):  # type: ignore[no-untyped-def]
    """Its address."""
    return np.uint64(array.ctypes.data)


@njit(cache=True, nogil=True)
def _take_queries(q, scale, scaled, powers):  # type: ignore[no-untyped-def]
    """q (G, d) as score pages take it: scaled (parts, G, m), and powers (parts, passes, m, MAX_WIDTH x QUERIES), what
    that becomes times 2^bit."""
    m = scaled.shape[2]
    for query in range(q.shape[0]):
        for channel in range(q.shape[1]):
            value = q[query, channel] * scale
            scaled[channel // m, query, channel % m] = value
            for bit in range(MAX_WIDTH):
                lane = QUERIES * bit + query % QUERIES
                powers[channel // m, query // QUERIES, channel % m, lane] = value * np.float32(1 << bit)


@njit(inline="always")
def _add_line(places, tables, codes, rows, stride, numbers, live):  # type: ignore[no-untyped-def]
    """Add the logits of 32 tokens for `live` of QUERIES queries; tables: their address."""
    if live == QUERIES:
        add_entries((places[0], places[1], places[2], places[3]), tables, codes, rows, stride, numbers)
    else:
        for j in range(live):
            one = (numbers[0][j],), (numbers[1][j],)
            add_entries((places[j],), tables + np.uint64(16 * j), codes, rows, stride, one)


@njit(cache=True, nogil=True, error_model="numpy")
def _score_page(page, form, q, powers, scratch, out):  # type: ignore[no-untyped-def]
    """Add the logits of the first tokens of a page, at an address, to out (G, tokens); q and powers as `_take_queries`
    has them."""
    m, T, rows, header_bytes = form
    entries, tables, line, places, offsets = scratch
    queries, count = out.shape
    least, codes, stride = page + np.uint64(2 * m), bare(page) + np.uint64(header_bytes), np.int64(T // 2)
    for first_query in range(0, queries, QUERIES):
        live = min(QUERIES, queries - first_query)
        fill_entries(_at(entries), page, _at(powers[first_query // QUERIES]), m, rows)
        units, zeros = fill_tables(_at(tables), _at(entries), rows)
        for j in range(live):
            offsets[j] = dot(_at(q[first_query + j]), least, m) - units[j] * zeros[j]
        numbers = units, (offsets[0], offsets[1], offsets[2], offsets[3])
        whole = count // LINE * LINE
        for j in range(live):
            places[j] = _at(out) + np.uint64((first_query + j) * out.strides[0])
        for first in range(0, whole, LINE):
            _add_line(places, _at(tables), codes + np.uint64(first // 2), rows, stride, numbers, live)
            for j in range(live):
                places[j] += np.uint64(4 * LINE)
        if whole < count:
            line[:] = 0
            for j in range(live):
                places[j] = _at(line[j])
            _add_line(places, _at(tables), codes + np.uint64(whole // 2), rows, stride, numbers, live)
            for j in range(live):
                for i in range(count - whole):
                    out[first_query + j, whole + i] += line[j, i]


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
    """Add a run's rows of V, weighted, to sums (Q, d), each code times its channel's scale (d,). run: see `_logits`.

    Five sums go together where five are left, as those of four queries and of what is chosen are.
    """
    (at, count, coded), (queries, d), first = run, sums.shape, 0
    each, width, scales_at = np.uint64(4 * d), np.uint64(4 * weights.shape[1]), _at(scales)
    while first < queries:
        s, w, left = _at(sums) + np.uint64(first) * each, _at(weights) + np.uint64(first) * width, queries - first
        if not coded:
            for i in range(count):
                add_scaled(s, (weights[first, i],), (at + np.uint64(2 * i * d),), d)
            first += 1
        elif left == 5:
            s5, w5 = (s + np.uint64(4) * each,), (w + np.uint64(4) * width,)
            add_code_run(_four(s, each) + s5, _four(w, width) + w5, at, count, scales_at, d)
            first += 5
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
def _score_rows(place, k_slots, pages, run_form, q, tokens, out):  # type: ignore[no-untyped-def]
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


@njit(cache=True, nogil=True, error_model="numpy")
def _score(begin, end, place, scores, pages, k_slots, seq_lens, form, run_form, q, out):  # type: ignore[no-untyped-def]
    """Logits of streams [begin, end); arguments as in `score`. Tokens that no score page holds get exact ones."""
    _, queries, d = q.shape
    m, T, rows, _ = form
    parts, scale = scores.shape[1], np.float32(1 / math.sqrt(d))
    scratch = (
        np.empty(QUERIES * (4 * rows + MAX_WIDTH), np.float32),
        np.empty(rows * ROW_BYTES, np.uint8),
        np.empty((QUERIES, LINE), np.float32),
        np.empty(QUERIES, np.uint64),
        np.empty(QUERIES, np.float32),
    )
    scaled = np.zeros((parts, queries, m), np.float32)
    powers = np.zeros((parts, (queries + QUERIES - 1) // QUERIES, m, MAX_WIDTH * QUERIES), np.float32)
    for stream in range(begin, end):
        _take_queries(q[stream], scale, scaled, powers)
        for first in range(0, seq_lens[stream], T):
            last = min(first + T, seq_lens[stream])
            if scores[stream, 0, first // T] == UNMAPPED:
                _score_rows(place, k_slots[stream], pages[stream], run_form, q[stream], (first, last), out[stream])
                continue
            out[stream, :, first:last] = 0
            for part in range(parts):
                page = _page(place, scores[stream, part, first // T])
                _score_page(page, form, scaled[part], powers[part], scratch, out[stream, :, first:last])


@njit(inline="always")
def _run_end(tokens, first, length, n, waiting):  # type: ignore[no-untyped-def]
    """Where the tokens of one group that follow each other end, or of one buffer of it."""
    last = first + 1
    while last < length and tokens[last] == tokens[last - 1] + 1 and tokens[last] % n % waiting:
        last += 1
    return last


@njit(cache=True, nogil=True, error_model="numpy")
def _attend_refined(  # type: ignore[no-untyped-def]
    begin, end, place, pages, slots, form, q, tokens, counts, alpha, v_mean, bends, seq_lens, out, rows
):
    """Attention of streams [begin, end), a run at a time: K is scored for all queries, then V is added.

    The sum of V of all that is chosen is one query more, with weights of 1: without it, the mean of V is of the others.
    The page of the run behind is asked for meanwhile.
    """
    (_, queries, d), (n, parts, waiting) = q.shape, form
    scale, width = np.float32(1 / math.sqrt(d)), (n + BLOCK - 1) // BLOCK * BLOCK
    scales, keys = np.empty(d, np.float32), np.empty((queries, d), np.float32)
    weights, sums = np.ones((queries + 1, width), np.float32), np.empty((queries + 1, d), np.float32)
    tops, totals = np.empty(queries, np.float32), np.empty(queries, np.float32)
    for stream in range(begin, end):
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
        others = seq_lens[stream] - length
        for channel in range(d):
            all_ = v_mean[stream, channel] * np.float32(seq_lens[stream])
            sums[queries, channel] = (all_ - sums[queries, channel]) / np.float32(others) if others else np.float32(0)
        out[stream] = sums[:queries]
        for query in range(queries):
            _mix(out[stream, query], totals[query], alpha[stream, query], sums[queries])
            rows[stream, query, 0], rows[stream, query, 1] = tops[query], _weight(totals[query], alpha[stream, query])


def planes_of(view: KvView) -> Planes:
    """The form of the layout's planes; raises ValueError for one that has none."""
    form = view.layout.planes
    if form is None:
        raise ValueError("K has no planes of few bits in this layout: use one that has them, such as planes2")
    return form


def score(view: KvView, q: F32, threads: int = 1) -> F32:
    """Logits of all tokens by K in few bits, q (N, G, d) float32. Returns (N, G, max S) float32.

    Tokens that no score page holds get exact logits; beyond a stream's length they are undefined.
    """
    form, planes = planes_of(view), view.planes
    out: F32 = np.empty((*q.shape[:2], int(view.seq_lens.max())), np.float32)
    shape = form.m, form.T, form.rows, form.header_bytes
    places = _place(view), planes["scores"], planes["refined"][:, 0], view.k_slots
    run_form = form.n, form.parts, form.waiting
    arguments = *places, view.seq_lens, shape, run_form, np.ascontiguousarray(q), out
    over_streams(_score, threads, q.shape[0], arguments)
    return out


def attend_refined(
    view: KvView, q: F32, chosen: Chosen, alpha: F32, v_mean: F32, bends: F32 | None = None, threads: int = 1
) -> tuple[F32, F32]:
    """What `kernels.attend` does, with K and V in 8 bits where a group is full.

    v_mean is of all tokens; what the selection misses goes to the mean of those that it leaves out.
    """
    form = planes_of(view)
    _check_selection(view, *chosen)
    out: F32 = np.empty(q.shape, np.float32)
    rows: F32 = np.empty((*q.shape[:2], 2), np.float32)
    run_form = form.n, form.parts, form.waiting
    places = _place(view), view.planes["refined"][:, 0], (view.k_slots, view.v_slots), run_form
    arguments = *places, np.ascontiguousarray(q), *chosen, alpha, v_mean, bends, view.seq_lens, out, rows
    over_streams(_attend_refined, threads, q.shape[0], arguments)
    return out, rows
