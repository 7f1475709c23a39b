"""Kernels over pages of progressive precision (`csd_spec.planes`): scores straight from the planes, and K and V in
8 bits, unpacked to FP16 for the kernels that attend.

A logit is offset + unit x an integer: of each page and query, the coefficients of all planes are rounded to 16 bits,
so that no sum of them overflows. With R planes that is within R / 64000 of the widest range that the page's codes have.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from attention_engine._half import half_to_float
from attention_engine._nibbles import TABLE_BYTES, fill_table, sum_entries
from attention_engine._parallel import over_streams
from attention_engine._rows import add_scaled, dots, unpack
from attention_engine.kernels import BLOCK, _check_selection, _mix, _page, _place, _rescale, _weight
from csd_spec import KvView
from csd_spec.arrays import F32, I32, I64
from csd_spec.planes import LEAST_EXPONENT, MAX_WIDTH, MOST_EXPONENT, Planes
from csd_spec.view import BANK_SHIFT, UNMAPPED

POWERS = np.exp2(np.arange(LEAST_EXPONENT, MOST_EXPONENT + 1, dtype=np.float32))
SHIFT = np.int32(12)  # bits of coefficients below those of entries: coefficients have 28
FRACTION, HALF = np.float32(1 << SHIFT), np.int32(1 << SHIFT >> 1)
RANGE = np.float32(32000)  # of sums of 16 bits; the rest is for what rounding up to 1024 planes adds


@njit(cache=True, nogil=True)
def _content(banks, slot):  # type: ignore[no-untyped-def]
    """A slot's page, as FP16 bits."""
    return banks[slot >> np.uint32(BANK_SHIFT)][slot & np.uint32((1 << BANK_SHIFT) - 1)]


@njit(cache=True, nogil=True)
def _read_header(page, m, header):  # type: ignore[no-untyped-def]
    """A score page's scales and ranges of channels as numbers, and the channel and the bit of each plane.

    Least values are read where they are. All bits of a channel are written, those that it does not have again by the
    next one: its width decides where that begins, and nothing has to be foreseen.
    """
    scales, spans, channels, bits = header
    plane = 0
    for channel in range(m):
        width = page[2 * m + channel // 2] >> np.uint16(channel % 2 * 8) & np.uint16(255)
        scales[channel] = half_to_float(page[channel])
        spans[channel] = scales[channel] * np.float32((1 << width) - 1)
        for bit in range(MAX_WIDTH):
            channels[plane + bit] = channel
        plane += width
    bits[0] = 0
    for i in range(1, plane):
        bits[i] = bits[i - 1] + 1 if channels[i] == channels[i - 1] else 0
    return plane


@njit(cache=True, nogil=True, error_model="numpy")
def _fill_tables(header, used, q, scratch, rows, tables_at):  # type: ignore[no-untyped-def]
    """Write the tables of a page's rows for q (m,); returns the unit of its logits. used: planes. scratch: coefficients
    of channels, and entries of planes, 4 a row."""
    scales, spans, channels, bits = header
    coefficients, entries = scratch
    lanes = np.zeros(8, np.float32)
    for channel in range(q.size):
        lanes[channel % 8] += abs(q[channel]) * spans[channel]
    widest = lanes.sum()
    scale = RANGE * FRACTION / widest if widest > 0 else np.float32(0)
    for channel in range(q.size):
        coefficients[channel] = np.int32(np.rint(q[channel] * scales[channel] * scale))
    for plane in range(used):
        entries[plane] = np.int16((coefficients[channels[plane]] * np.int32(1 << bits[plane]) + HALF) >> SHIFT)
    entries[used:] = 0
    for row in range(rows):
        fill_table(tables_at + np.uint64(TABLE_BYTES * row), np.uint64(entries.ctypes.data + 8 * row))
    return widest / RANGE


@njit(cache=True, nogil=True, error_model="numpy")
def _score_page(page, form, q, scratch, out):  # type: ignore[no-untyped-def]
    """Add a page's logits of its first tokens to out (G, tokens), for q (G, m) that is scaled."""
    m, T, rows, header_bytes = form
    header, entries, tables, sums, line = scratch
    queries, count = out.shape
    page_at = np.uint64(page.ctypes.data)
    size, least_at, codes_at = (
        np.uint64(rows * TABLE_BYTES),
        page_at + np.uint64(2 * m),
        page_at + np.uint64(header_bytes),
    )
    tables_at, sums_at = np.uint64(tables.ctypes.data), np.uint64(sums.ctypes.data)
    used = _read_header(page, m, header)
    for query in range(queries):
        line[query, 0] = _fill_tables(header, used, q[query], entries, rows, tables_at + np.uint64(query) * size)
        line[query, 1] = dots(np.uint64(q[query].ctypes.data), (least_at,), (), m)[0]
    for first in range(0, count, 32):
        at = codes_at + np.uint64(first // 2)
        for query in range(0, queries - 3, 4):
            s, t = sums_at + np.uint64(64 * query), tables_at + np.uint64(query) * size
            some = s, s + np.uint64(64), s + np.uint64(128), s + np.uint64(192)
            sum_entries(some, (t, t + size, t + np.uint64(2) * size, t + np.uint64(3) * size), at, rows, T // 2)
        for query in range(queries // 4 * 4, queries):
            sum_entries((sums_at + np.uint64(64 * query),), (tables_at + np.uint64(query) * size,), at, rows, T // 2)
        for query in range(queries):
            unit, offset = line[query]
            for i in range(min(32, count - first)):
                out[query, first + i] += offset + unit * np.float32(sums[query, i])


@njit(cache=True, nogil=True, error_model="numpy")
def _unpack_rows(page, part, n, d, powers, rows):  # type: ignore[no-untyped-def]
    """K (part 0) or V (1) of a refined page as FP16 bits, into rows (n * d or more,)."""
    page_at, rows_at = np.uint64(page.ctypes.data), np.uint64(rows.ctypes.data)
    exponents = page.view(np.int8)[part * d : (part + 1) * d]
    for channel in range(d):
        powers[channel] = POWERS[exponents[channel] - LEAST_EXPONENT]
    for row in range(n):
        codes = page_at + np.uint64((2 + part * n + row) * d)
        unpack(rows_at + np.uint64(2 * row * d), codes, np.uint64(powers.ctypes.data), d)


@njit(cache=True, nogil=True, error_model="numpy")
def _score_rows(banks, place, k_slots, pages, n, q, tokens, out):  # type: ignore[no-untyped-def]
    """Exact logits (G, S) of some tokens from their rows of K, in 8 bits or in FP16."""
    queries, d = q.shape
    scale, powers, rows = np.float32(1 / math.sqrt(d)), np.empty(d, np.float32), np.empty(n * d, np.uint16)
    first, last = tokens
    for token in range(first, last):
        group, row = token // n, token % n
        if pages[group] == UNMAPPED:
            at = _page(place, k_slots[group]) + np.uint64(2 * row * d)
        else:
            if token == first or row == 0:
                _unpack_rows(_content(banks, pages[group]), 0, n, d, powers, rows)
            at = np.uint64(rows.ctypes.data + 2 * row * d)
        for query in range(queries):
            q_row = np.uint64(q.ctypes.data + 4 * query * d)
            out[query, token] = scale * dots(q_row, (at,), (), d)[0]


@njit(cache=True, nogil=True, error_model="numpy")
def _score(begin, end, banks, place, scores, pages, k_slots, seq_lens, form, n, q, out):  # type: ignore[no-untyped-def]
    """Logits of streams [begin, end); arguments as in `score`. Tokens that no score page holds get exact ones."""
    _, queries, d = q.shape
    m, T, rows, _ = form
    parts, scale = scores.shape[1], np.float32(1 / math.sqrt(d))
    scratch = (
        (
            np.empty(m, np.float32),
            np.empty(m, np.float32),
            np.empty(4 * rows + MAX_WIDTH, np.uint8),
            np.empty(4 * rows, np.uint8),
        ),
        (np.empty(m, np.int32), np.empty(4 * rows, np.int16)),
        np.empty((queries, rows * TABLE_BYTES), np.uint8),
        np.empty((queries, 32), np.int16),
        np.empty((queries, 2), np.float32),
    )
    scaled = np.zeros((parts, queries, m), np.float32)
    for stream in range(begin, end):
        for query in range(queries):
            for channel in range(d):
                scaled[channel // m, query, channel % m] = q[stream, query, channel] * scale
        for first in range(0, seq_lens[stream], T):
            last = min(first + T, seq_lens[stream])
            if scores[stream, 0, first // T] == UNMAPPED:
                _score_rows(banks, place, k_slots[stream], pages[stream], n, q[stream], (first, last), out[stream])
                continue
            out[stream, :, first:last] = 0
            for part in range(parts):
                page = _content(banks, scores[stream, part, first // T])
                _score_page(page, form, scaled[part], scratch, out[stream, :, first:last])


@njit(cache=True, nogil=True)
def _locate(rows_at, row_bytes, tokens, n, addresses):  # type: ignore[no-untyped-def]
    """Addresses of the rows of a group's tokens, from that of its first."""
    for i in range(tokens.size):
        addresses[i] = rows_at + np.uint64(tokens[i] % n) * row_bytes


@njit(inline="always")
def _logits(q_at, keys, count, d, scale, out):  # type: ignore[no-untyped-def]
    """Logits of `count` rows of K into out, -inf behind them up to a multiple of BLOCK."""
    for i in range(0, count - 3, 4):
        four = dots(q_at, (keys[i], keys[i + 1], keys[i + 2], keys[i + 3]), (), d)
        for j in range(4):
            out[i + j] = scale * four[j]
    for i in range(count // 4 * 4, count):
        out[i] = scale * dots(q_at, (keys[i],), (), d)[0]
    out[count : (count + BLOCK - 1) // BLOCK * BLOCK] = -np.inf


@njit(inline="always")
def _add_values(sums_at, weights, values, count, d):  # type: ignore[no-untyped-def]
    """Add `count` weighted rows of V to sums."""
    for i in range(0, count - 3, 4):
        some = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        add_scaled(sums_at, some, (values[i], values[i + 1], values[i + 2], values[i + 3]), (), d)
    for i in range(count // 4 * 4, count):
        add_scaled(sums_at, (weights[i],), (values[i],), (), d)


@njit(cache=True, nogil=True, error_model="numpy")
def _attend_refined(  # type: ignore[no-untyped-def]
    begin, end, banks, place, pages, slots, n, q, tokens, counts, alpha, v_mean, seq_lens, out, rows
):
    """Attention of streams [begin, end), a group at a time: K is unpacked and scored, then V is unpacked and added.

    The sum of V of all that is chosen is one query more, with weights of 1: without it, the mean of V is of the others.
    """
    _, queries, d = q.shape
    scale, width = np.float32(1 / math.sqrt(d)), (n + BLOCK - 1) // BLOCK * BLOCK
    powers, unpacked, addresses = np.empty(d, np.float32), np.empty(n * d, np.uint16), np.empty(n, np.uint64)
    weights, ones, total = np.empty((queries, width), np.float32), np.ones(n, np.float32), np.empty(d, np.float32)
    tops, totals = np.empty(queries, np.float32), np.empty(queries, np.float32)
    for stream in range(begin, end):
        tops[:], totals[:], total[:] = -np.inf, 0, 0
        out[stream] = 0
        first, length = 0, counts[stream]
        while first < length:
            group, last = tokens[stream, first] // n, first + 1
            while last < length and tokens[stream, last] // n == group:
                last += 1
            mine, page = tokens[stream, first:last], pages[stream, group]
            for part in range(2):
                rows_at = np.uint64(unpacked.ctypes.data)
                if page == UNMAPPED:
                    rows_at = _page(place, slots[part][stream, group])
                else:
                    _unpack_rows(_content(banks, page), part, n, d, powers, unpacked)
                _locate(rows_at, np.uint64(2 * d), mine, n, addresses)
                for query in range(queries):
                    if part == 0:
                        _logits(np.uint64(q[stream, query].ctypes.data), addresses, mine.size, d, scale, weights[query])
                        weights_at, size = (
                            np.uint64(weights[query].ctypes.data),
                            (mine.size + BLOCK - 1) // BLOCK * BLOCK,
                        )
                        _rescale(weights_at, size, tops, totals, query, out[stream, query])
                    else:
                        _add_values(np.uint64(out[stream, query].ctypes.data), weights[query], addresses, mine.size, d)
            _add_values(np.uint64(total.ctypes.data), ones, addresses, mine.size, d)
            first = last
        others = seq_lens[stream] - length
        for channel in range(d):
            all_ = v_mean[stream, channel] * np.float32(seq_lens[stream])
            total[channel] = (all_ - total[channel]) / np.float32(others) if others else np.float32(0)
        for query in range(queries):
            _mix(out[stream, query], totals[query], alpha[stream, query], total)
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
    places = view.banks, _place(view), planes["scores"], planes["refined"][:, 0], view.k_slots
    arguments = *places, view.seq_lens, shape, form.n, np.ascontiguousarray(q), out
    over_streams(_score, threads, q.shape[0], arguments)
    return out


def attend_refined(
    view: KvView, q: F32, tokens: I32, counts: I64, alpha: F32, v_mean: F32, threads: int = 1
) -> tuple[F32, F32]:
    """What `kernels.attend` does, with K and V in 8 bits where a group is full.

    v_mean is of all tokens; what the selection misses goes to the mean of those that it leaves out.
    """
    form = planes_of(view)
    _check_selection(view, tokens, counts)
    out: F32 = np.empty(q.shape, np.float32)
    rows: F32 = np.empty((*q.shape[:2], 2), np.float32)
    places = view.banks, _place(view), view.planes["refined"][:, 0], (view.k_slots, view.v_slots), form.n
    arguments = *places, np.ascontiguousarray(q), tokens, counts, alpha, v_mean, view.seq_lens, out, rows
    over_streams(_attend_refined, threads, q.shape[0], arguments)
    return out, rows
