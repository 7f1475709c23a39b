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
from attention_engine.kernels import _attend, _check_selection, _page, _place
from csd_spec import KvView
from csd_spec.arrays import F32, I32, I64
from csd_spec.planes import LEAST_EXPONENT, MOST_EXPONENT, Planes
from csd_spec.view import BANK_SHIFT, UNMAPPED

POWERS = np.exp2(np.arange(LEAST_EXPONENT, MOST_EXPONENT + 1, dtype=np.float32))
RANGE = np.float32(32000)  # of sums of 16 bits; the rest is for what rounding up to 1024 planes adds


@njit(cache=True, nogil=True)
def _content(banks, slot):  # type: ignore[no-untyped-def]
    """A slot's page, as FP16 bits."""
    return banks[slot >> np.uint32(BANK_SHIFT)][slot & np.uint32((1 << BANK_SHIFT) - 1)]


@njit(cache=True, nogil=True)
def _read_header(page, m, header):  # type: ignore[no-untyped-def]
    """A score page's widths, scales and ranges of channels as numbers; least values are read where they are."""
    widths, scales, spans = header
    for channel in range(m):
        widths[channel] = page[2 * m + channel // 2] >> np.uint16(channel % 2 * 8) & np.uint16(255)
        scales[channel] = half_to_float(page[channel])
        spans[channel] = scales[channel] * np.float32((1 << widths[channel]) - 1)


@njit(cache=True, nogil=True, error_model="numpy")
def _fill_tables(header, q, entries, rows, tables_at):  # type: ignore[no-untyped-def]
    """Write the tables of a page's rows for q (m,); returns the unit of its logits. entries: scratch, 4 a row."""
    widths, scales, spans = header
    lanes = np.zeros(8, np.float32)
    for channel in range(q.size):
        lanes[channel % 8] += abs(q[channel]) * spans[channel]
    widest = lanes.sum()
    if widest == 0:
        entries[:] = 0
    scale, plane = RANGE / widest, 0
    for channel in range(q.size if widest > 0 else 0):
        entry = q[channel] * scales[channel] * scale
        for _ in range(widths[channel]):
            entries[plane] = np.int16(np.rint(entry))
            entry += entry
            plane += 1
    entries[plane:] = 0
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
    _read_header(page, m, header)
    for query in range(queries):
        line[query, 0] = _fill_tables(header, q[query], entries, rows, tables_at + np.uint64(query) * size)
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
        (np.empty(m, np.uint8), np.empty(m, np.float32), np.empty(m, np.float32)),
        np.empty(4 * rows, np.int16),
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


@njit(cache=True, nogil=True, error_model="numpy")
def _attend_refined(  # type: ignore[no-untyped-def]
    begin, end, banks, place, pages, slots, n, q, tokens, counts, alpha, v_mean, out, rows
):
    """Attention of streams [begin, end): chosen groups are unpacked, K and V a page each, then all is as in FP16."""
    d = q.shape[2]
    k_slots, v_slots, each = slots[0].copy(), slots[1].copy(), np.uint64(n)
    powers, values = np.empty(d, np.float32), banks[0].shape[1]
    scratch = np.empty((0, values), np.uint16)
    for stream in range(begin, end):
        found, last = 0, -1
        for i in range(counts[stream]):
            group = tokens[stream, i] // n
            if group != last and pages[stream, group] != UNMAPPED:
                k_slots[stream, group], v_slots[stream, group] = 2 * found, 2 * found + 1
                found += 1
            last = group
        if 2 * found > scratch.shape[0]:
            scratch = np.empty((2 * found, values), np.uint16)
        last = -1
        for i in range(counts[stream]):
            group = tokens[stream, i] // n
            if group != last and pages[stream, group] != UNMAPPED:
                page = _content(banks, pages[stream, group])
                _unpack_rows(page, 0, n, d, powers, scratch[k_slots[stream, group]])
                _unpack_rows(page, 1, n, d, powers, scratch[v_slots[stream, group]])
            last = group
        unpacked = np.uint64(scratch.ctypes.data), place[1], place[2]
        _attend(stream, stream + 1, unpacked, k_slots, v_slots, each, q, tokens, counts, alpha, v_mean, out, rows)


@njit(cache=True, nogil=True, error_model="numpy")
def _sum_values(begin, end, banks, place, pages, v_slots, n, tokens, counts, sums):  # type: ignore[no-untyped-def]
    """Sums of the rows of V of streams [begin, end)'s selected tokens: of codes group by group, then in token order."""
    d = sums.shape[1]
    total, one = np.zeros(d, np.int32), np.float32(1)
    for stream in range(begin, end):
        sums[stream] = 0
        for i in range(counts[stream]):
            group, row = tokens[stream, i] // n, tokens[stream, i] % n
            if pages[stream, group] == UNMAPPED:
                at = _page(place, v_slots[stream, group]) + np.uint64(2 * row * d)
                add_scaled(np.uint64(sums.ctypes.data + 4 * stream * d), (one,), (at,), (), d)
                continue
            page = _content(banks, pages[stream, group]).view(np.int8)
            codes = page[(2 + n + row) * d : (3 + n + row) * d]
            for channel in range(d):
                total[channel] += codes[channel]
            if i + 1 == counts[stream] or tokens[stream, i + 1] // n != group:
                for channel in range(d):
                    sums[stream, channel] += total[channel] * POWERS[page[d + channel] - LEAST_EXPONENT]
                total[:] = 0


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
    """What `kernels.attend` does, with K and V in 8 bits where a group is full."""
    form = planes_of(view)
    _check_selection(view, tokens, counts)
    out: F32 = np.empty(q.shape, np.float32)
    rows: F32 = np.empty((*q.shape[:2], 2), np.float32)
    places = view.banks, _place(view), view.planes["refined"][:, 0], (view.k_slots, view.v_slots), form.n
    arguments = *places, np.ascontiguousarray(q), tokens, counts, alpha, v_mean, out, rows
    over_streams(_attend_refined, threads, q.shape[0], arguments)
    return out, rows


def sum_values(view: KvView, tokens: I32, counts: I64, threads: int = 1) -> F32:
    """Sums (N, d) of the rows of V of tokens (N, k), of which counts (N,) are used, in 8 bits where a group is full."""
    _check_selection(view, tokens, counts)
    sums: F32 = np.empty((counts.size, view.layout.head_dim), np.float32)
    places = view.banks, _place(view), view.planes["refined"][:, 0], view.v_slots, planes_of(view).n
    over_streams(_sum_values, threads, counts.size, (*places, tokens, counts, sums))
    return sums
