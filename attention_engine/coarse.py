"""Kernels over score pages and value pages (`csd_spec.progressive`): all keys and values at low precision.

All sums are sums of integers. A logit is (offset x 2^-20 + unit x sum of factor x digit) / sqrt(d) - variance / 2. A
factor is an int8 multiple of q x scale x 4^level, under one power of two for each page and query. The offset is the sum
over channels of q x minimum, each in multiples of 2^-20. The variance is the variance of the quantization error of the
logit; half of it is the mean bias of a token's weight: the mean of e^(x + error) is e^(x + variance / 2). A weight
times the size of its token is an int8 multiple of one unit for each page and query. The rounding error of a token is
carried over to the token 16 places later, so that the total of many small weights is preserved.
"""

from __future__ import annotations

import math
import threading
from typing import NamedTuple

import numpy as np

from attention_engine._digits import QUERIES, add_scores, fill_factors, read_header
from attention_engine._exp import exp
from attention_engine._lanes import add_rows_of, largest_of, square_codes, squares_of, total_of, widen_halves
from attention_engine._parallel import over_streams
from attention_engine._rows import prefetch, untagged_address
from attention_engine._weights import add_values, round_weights, sum_values2, sum_values4
from attention_engine.forms import ScoreForm, ScoreScratch, ValueForm, ValuePage
from attention_engine.kernels import _page, _place
from attention_engine.page_selection import VARIANCE
from attention_engine.refined import _address, _four_rows, progressive_form, run_form, score_rows
from csd_io.compiled import njit
from csd_io.rotation import rotate_back
from csd_spec import KvSlotView
from csd_spec.arrays import F32, I32, I64, Bools
from csd_spec.progressive import DIGITS, LANES, QUAD, RESTS
from csd_spec.view import UNMAPPED

ENERGY = 0.715, 8.8  # mean square of a normal 2-bit and 4-bit value, in units of its token size
NOISE = ENERGY[0] * VARIANCE[2], ENERGY[1] * VARIANCE[4]  # mean square of its error


@njit(inline="always")
def _in_passes(queries, first):  # type: ignore[no-untyped-def]
    """Return the number of queries in the pass that starts at `first`: 4, 2 or 1."""
    left = queries - first
    return 4 if left >= 4 else 2 if left >= 2 else 1


@njit(inline="always")
def _two_rows(at, stride):  # type: ignore[no-untyped-def]
    """Return the addresses of two rows."""
    return at, at + stride


@njit(cache=True, nogil=True)
def _prepare_queries(q, m, rows, powers):  # type: ignore[no-untyped-def]
    """Convert q (G, d) to rows (parts, passes, 4, ...) for `read_header` and to powers for `fill_factors`.

    powers (parts, passes, m, 16): 4^0 to 4^3 times the four queries of a pass.
    """
    rows[:], powers[:] = 0, 0
    for query in range(q.shape[0]):
        for channel in range(q.shape[1]):
            rows[channel // m, query // QUERIES, query % QUERIES, channel % m] = q[query, channel]
            for level in range(DIGITS):
                value = q[query, channel] * np.float32(1 << 2 * level)
                powers[channel // m, query // QUERIES, channel % m, QUERIES * level + query % QUERIES] = value


@njit(cache=True, nogil=True, error_model="numpy")
def _score_blocks(out, factors, lines, shape, numbers, first, some):  # type: ignore[no-untyped-def]
    """Add the logits of blocks of 16 tokens for `some` queries; `first` is the index of the first of them in its pass.

    out: address of the logits, bytes between two queries, and whether there are no logits yet. lines: see `add_scores`,
    and the prefetch offset.
    """
    (at, each, fresh), (place, prefetch_offset), ((u0, u1, u2, _), (o0, o1, o2, _)) = out, lines, numbers
    if some == 4:
        add_scores(_four_rows(at, each), fresh, factors, place, prefetch_offset, shape, numbers)
    elif some == 2:
        add_scores(_two_rows(at, each), fresh, factors, place, prefetch_offset, shape, ((u0, u1), (o0, o1)))
    elif first == 0:
        add_scores((at,), fresh, factors, place, prefetch_offset, shape, ((u0,), (o0,)))
    else:
        add_scores((at,), fresh, factors + np.uint64(8), place, prefetch_offset, shape, ((u2,), (o2,)))


@njit(cache=True, nogil=True, error_model="numpy")
def _score_page(page, form, query_rows, scale, scratch, out, tokens, variances):  # type: ignore[no-untyped-def]
    """Add the logits of the first tokens of a page; add their error variances, times the tokens, to `variances`.

    page: its address, and the prefetch offset of the next page. form: `ScoreForm`. query_rows: addresses of the rows
    and powers from `_prepare_queries` for its channels, and bytes of a pass of each. scratch: addresses. out: see
    `_score_blocks`.
    """
    (place, prefetch_offset), ((rows, row_bytes), (powers, pass_bytes)) = page, query_rows
    m, digits, bf16, factors, scales = form.m, form.digits, form.bf16, scratch.factors, scratch.scales
    (at, each, fresh), queries, whole = out, variances.size, tokens // LANES
    lines, number, half = place + np.uint64(form.header_bytes), digits // LANES, scale * scale / np.float32(2)
    for first in range(0, queries, QUERIES):
        number_of = np.uint64(first // QUERIES)
        (o0, o1, o2, o3), missed = read_header(scales, place, bf16, rows + number_of * row_bytes, m)
        (u0, u1, u2, u3), rounding = fill_factors(
            factors, scratch.entries, scales, place, powers + number_of * pass_bytes, m, digits
        )
        v0, v1 = missed[0] + rounding[0], missed[1] + rounding[1]
        v2, v3 = missed[2] + rounding[2], missed[3] + rounding[3]
        offsets = o0 * scale - v0 * half, o1 * scale - v1 * half, o2 * scale - v2 * half, o3 * scale - v3 * half
        numbers, taken, live = (
            ((u0 * scale, u1 * scale, u2 * scale, u3 * scale), offsets),
            0,
            min(QUERIES, queries - first),
        )
        for j in range(live):
            variances[first + j] += (v0, v1, v2, v3)[j] * scale * scale * np.float32(tokens)
        while taken < live:
            some, mine = _in_passes(live, taken), at + np.uint64(first + taken) * each
            _score_blocks((mine, each, fresh), factors, (lines, prefetch_offset), (number, whole), numbers, taken, some)
            if whole * LANES < tokens:
                rest, there = lines + np.uint64(4 * whole * digits), (scratch.line, np.uint64(4 * LANES), True)
                _score_blocks(there, factors, (rest, prefetch_offset), (number, 1), numbers, taken, some)
                add_rows_of(
                    mine + np.uint64(4 * LANES * whole), each, fresh, scratch.line, some, tokens - whole * LANES
                )
            taken += some


@njit(inline="always")
def _next_page_offset(place, page, slots, stream, part, group, header_bytes):  # type: ignore[no-untyped-def]
    """Return the offset to the next part of the group or to the next group, or 0; prefetch the header of that page."""
    part += 1
    if part == slots.shape[1]:
        part, group = 0, group + 1
    if group == slots.shape[2] or slots[stream, part, group] == UNMAPPED:
        return np.uint64(0)
    following = untagged_address(_page(place, slots[stream, part, group]))
    prefetch((following,), header_bytes)
    return following - page


@njit(cache=True, nogil=True, error_model="numpy")
def _score_stream(place, slots, stream, tokens, form, exact, q, query_rows, scratch, out, variances):  # type: ignore[no-untyped-def]
    """Compute logits (G, S) of a stream's tokens for q (G, d), and error variances (G,) times the number of tokens.

    Addresses are computed once, because Numba updates a reference count for each use of an array, which takes half as
    long as a page. query_rows: from `_prepare_queries`. exact: arguments of `score_rows` for tokens without a score
    page.
    """
    m, T, header_bytes, (k_slots, refined, runs) = form.m, form.T, form.header_bytes, exact
    scale = np.float32(1 / math.sqrt(q.shape[1]))
    buffers = ScoreScratch(
        _address(scratch.factors), _address(scratch.entries), _address(scratch.line), _address(scratch.scales)
    )
    (rows, powers), passes = query_rows, np.uint64(query_rows[0].shape[1])
    row_at, row_bytes = _address(rows), np.uint64(4 * QUERIES * rows.shape[3])
    power_at, pass_bytes = _address(powers), np.uint64(4 * LANES * m)
    at, each = _address(out), np.uint64(4 * out.shape[1])
    for first in range(0, tokens, T):
        group, last = first // T, min(first + T, tokens)
        if slots[stream, 0, group] == UNMAPPED:
            score_rows(place, k_slots[stream], refined[stream], runs, q, (first, last), out)
            continue
        for part in range(slots.shape[1]):
            page, mine = untagged_address(_page(place, slots[stream, part, group])), at + np.uint64(4 * first)
            behind = page, _next_page_offset(place, page, slots, stream, part, group, header_bytes)
            before = np.uint64(part) * passes
            these = (row_at + before * row_bytes, row_bytes), (power_at + before * pass_bytes, pass_bytes)
            _score_page(behind, form, these, scale, buffers, (mine, each, part == 0), last - first, variances)


@njit(cache=True, nogil=True, error_model="numpy")
def _score(begin, end, place, slots, exact, seq_lens, form, q, out, variances):  # type: ignore[no-untyped-def]
    """Compute logits of streams [begin, end); for the arguments, see `score`."""
    m, digits, queries = form.m, form.digits, q.shape[1]
    factors, entries = np.empty(QUERIES * digits, np.int8), np.empty(QUERIES * (digits + DIGITS), np.float32)
    width, passes = (m + LANES - 1) // LANES * LANES, (queries + QUERIES - 1) // QUERIES
    scratch = ScoreScratch(factors, entries, np.empty((QUERIES, LANES), np.float32), np.empty(width, np.float32))
    rows = np.empty((slots.shape[1], passes, QUERIES, width), np.float32)
    query_rows = rows, np.empty((slots.shape[1], passes, m, LANES), np.float32)
    for stream in range(begin, end):
        found, length = variances[stream], seq_lens[stream]
        found[:] = 0
        _prepare_queries(q[stream], m, *query_rows)
        _score_stream(place, slots, stream, length, form, exact, q[stream], query_rows, scratch, out[stream], found)
        for query in range(queries):
            found[query] /= np.float32(length)


@njit(inline="always")
def _add_queries(page, addresses, row_sums):  # type: ignore[no-untyped-def]
    """Add the weighted tokens of a value page to the sums of some queries, and (weights x sizes)^2 to their squares.

    page: `ValuePage`. addresses: tuples of addresses of weights, of scratch for their multiples, of scratch for sums of
    codes, and of sums. row_sums: addresses of the sums of the weights and of the squares.
    """
    weights, multiples, found, sums = addresses
    tokens, lines = page.tokens, page.lines
    numbers = round_weights(weights, page.sizes, tokens, (tokens + LANES - 1) // LANES, multiples)
    if page.bits == 2:
        sum_values2(found, multiples, page.at, page.prefetch_offset, lines, page.blocks)
    else:
        sum_values4(found, multiples, page.at, page.prefetch_offset, lines, page.blocks)
    add_values(sums, row_sums, found, page.rests, lines, np.float32((1 << page.bits) - 1), numbers)


@njit(cache=True, nogil=True, error_model="numpy")
def _add_page(page, form, weights, tokens, scratch, sums, row_sums, queries):  # type: ignore[no-untyped-def]
    """Add the weighted tokens of a value page to sums in the rotated basis, and (weights x sizes)^2 to squares.

    All arguments are addresses: the reference counts of arrays would take longer than a page. page: its address, and
    the prefetch offset of the next page. form: `ValueForm`. weights, sums: address for the first query, and bytes
    between two queries. row_sums: see `_add_queries`.
    """
    m, bits, (at, each), (to, row), first = form.m, form.bits, weights, sums, 0
    (place, prefetch_offset), (sizes, rests, multiples, found) = page, scratch
    lines, block, size = (m + LANES - 1) // LANES, QUAD * 8 // bits, np.uint64((tokens + LANES - 1) // LANES * LANES)
    widen_halves(sizes, place, tokens, form.bf16)
    square_codes(rests, place + np.uint64(form.sizes_bytes), m, largest_of(sizes, tokens) * RESTS)
    blocks, lines_at = (tokens + block - 1) // block, place + np.uint64(form.header_bytes)
    mine = ValuePage(bits, sizes, rests, tokens, lines, blocks, lines_at, prefetch_offset)
    while first < queries:
        some, w, s = _in_passes(queries, first), at + np.uint64(first) * each, to + np.uint64(first) * row
        added = row_sums[0] + np.uint64(4 * first), row_sums[1] + np.uint64(4 * first)
        if some == 4:
            _add_queries(
                mine,
                (_four_rows(w, each), _four_rows(multiples, size), _four_rows(found, row), _four_rows(s, row)),
                added,
            )
        elif some == 2:
            _add_queries(
                mine, (_two_rows(w, each), _two_rows(multiples, size), _two_rows(found, row), _two_rows(s, row)), added
            )
        else:
            _add_queries(mine, ((w,), (multiples,), (found,), (s,)), added)
        first += some


@njit(cache=True, nogil=True, error_model="numpy")
def _merge(out, rows, sums, scores, weights, v_mean):  # type: ignore[no-untyped-def]
    """Merge a row attended in 8 bits, out (d,) with m and l in rows (2,), and the other tokens.

    Returns the share of the weight that has no page, the share of the 8-bit attention, and the share of a weight of e^0
    relative to the largest score. sums (d,): low-precision sum of the other tokens relative to their largest logit.
    scores: that logit. weights: weight of the sums, and weight that the mean of V represents.
    """
    fine, (top_weight, left) = rows[0], weights
    top = max(fine, scores)
    a = rows[1] * exp(fine - top) if rows[1] > 0 else np.float32(0)
    b = exp(scores - top) if top_weight + left > 0 else np.float32(0)
    whole = a + b * (top_weight + left)
    for channel in range(out.size):
        out[channel] = (a * out[channel] + b * (sums[channel] + left * v_mean[channel])) / whole
    rows[0], rows[1] = top, whole
    return b * left / whole, a / whole, b / whole


@njit(cache=True, nogil=True, error_model="numpy")
def _add_stream(place, slots, reads, stream, weights, length, form, scratch, found):  # type: ignore[no-untyped-def]
    """Add the weighted tokens of a stream to `found`, for weights (G, S).

    found: (parts, G, ...) sums, (2, G) weights with and without a page, and (G,) squares of weights x sizes.
    """
    (page_form, per_page), (sums, shares, squares), (sizes, rests, multiples, values, masses) = form, found, scratch
    queries, buffers = squares.size, (_address(sizes), _address(rests), _address(multiples), _address(values))
    to, row, row_sums = _address(sums), np.uint64(4 * sums.shape[2]), (_address(masses), _address(squares))
    at, each = _address(weights), np.uint64(4 * weights.shape[1])
    for first in range(0, length, per_page):
        group, count, mine = first // per_page, min(per_page, length - first), at + np.uint64(4 * first)
        if slots[stream, 0, group] == UNMAPPED:
            continue
        for query in range(queries):
            masses[query] = total_of(mine + np.uint64(query) * each, count)
            shares[0 if reads[stream, group] else 1, query] += masses[query]
        if reads[stream, group]:
            for part in range(slots.shape[1]):
                page = untagged_address(_page(place, slots[stream, part, group]))
                prefetch_offset = _next_page_offset(place, page, slots, stream, part, group, page_form.header_bytes)
                out = to + np.uint64(part * queries) * row, row
                _add_page((page, prefetch_offset), page_form, (mine, each), count, buffers, out, row_sums, queries)


@njit(cache=True, nogil=True, error_model="numpy")
def _attend_coarse(begin, end, place, slots, choice, scores, v_mean, seq_lens, form, fine, lost, errors):  # type: ignore[no-untyped-def]
    """Compute `attend_coarse` for streams [begin, end)."""
    (page_form, per_page), (out, rows, of_codes), parts, (_, queries, d) = form, fine, slots.shape[1], fine[0].shape
    (tokens, counts, reads), (weights, tops, variances) = choice, scores
    m, bits = page_form.m, page_form.bits
    room, width = (per_page + LANES - 1) // LANES * LANES, (m + LANES - 1) // LANES * LANES
    sizes, rests = np.empty(room, np.float32), np.empty(width, np.float32)
    multiples, values = np.empty((QUERIES, room), np.int8), np.empty((QUERIES, width), np.int32)
    scratch = sizes, rests, multiples, values, np.empty(queries, np.float32)
    sums, shares = np.empty((parts, queries, width), np.float32), np.empty((2, queries), np.float32)
    squares, joined = np.empty(queries, np.float32), np.empty(parts * m, np.float32)
    of_v, of_k = np.float32(m * NOISE[bits // 4]), np.float32(m * ENERGY[bits // 4])
    for stream in range(begin, end):
        sums[:], shares[:], squares[:] = 0, 0, 0
        for query in range(queries):
            for i in range(counts[stream]):
                weights[stream, query, tokens[stream, i]] = 0
        results = sums, shares, squares
        _add_stream(place, slots, reads, stream, weights[stream], seq_lens[stream], form, scratch, results)
        for query in range(queries):
            for part in range(parts):
                rotate_back(sums[part, query, :m])
                joined[part * m : (part + 1) * m] = sums[part, query, :m]
            share, top, row = (shares[0, query], shares[1, query]), tops[stream, query], out[stream, query]
            length = of_codes[stream, query] * np.sqrt(squares_of(_address(row), d))
            lost[stream, query], of_fine, scale = _merge(row, rows[stream, query], joined, top, share, v_mean[stream])
            missed = scale * scale * squares[query] * (of_v + variances[stream, query] * of_k)
            missed += (of_fine * length) ** 2
            size = np.sqrt(squares_of(_address(row), d))
            errors[stream, query] = np.sqrt(missed) / size if size > 0 else np.float32(0)


class Scores(NamedTuple):
    """Scores from low-precision keys.

    Attributes:
        weights: e^(logit - largest) of all tokens, (N, G, S).
        tops: Largest logit, (N, G).
        variances: Variances of the errors of the logits, (N, G).
    """

    weights: F32
    tops: F32
    variances: F32


_KEPT = threading.local()


def _scratch(*shape: int) -> F32:
    """Return a thread-local array for logits. A new memory mapping in each step would cost a third of the time."""
    size, scratch = math.prod(shape), getattr(_KEPT, "logits", None)
    if scratch is None or not size <= scratch.size <= 4 * max(size, 1 << 16):
        scratch = _KEPT.logits = np.empty(size, np.float32)
    logits: F32 = scratch[:size].reshape(shape)
    return logits


def score(view: KvSlotView, q: F32, threads: int = 1) -> tuple[F32, F32]:
    """Compute logits of all tokens from low-precision keys.

    Args:
        view: Pages of the keys.
        q: Queries, (N, G, d) float32.
        threads: Number of threads for the streams.

    Returns:
        Logits, (N, G, max S) float32, valid until the next call from the same thread, and the mean variance of their
        errors, (N, G). Tokens without a score page get exact logits; logits after the end of a stream are undefined.
    """
    form, maps = progressive_form(view), view.maps
    out = _scratch(*q.shape[:2], int(view.seq_lens.max()))
    shape = ScoreForm(form.m, form.T, form.D, form.header_bytes, form.bf16)
    exact = view.k_slots, maps["refined"][:, 0], run_form(form)
    variances: F32 = np.empty(q.shape[:2], np.float32)
    arguments = _place(view), maps["scores"], exact, view.seq_lens, shape, np.ascontiguousarray(q), out, variances
    over_streams(_score, threads, q.shape[0], arguments)
    return out, variances


def attend_coarse(
    view: KvSlotView,
    fine: tuple[F32, F32, F32],
    choice: tuple[I32, I64, Bools],
    scores: Scores,
    v_mean: F32,
    threads: int = 1,
) -> tuple[F32, F32]:
    """Add low-precision attention over all other tokens to 8-bit attention over some tokens.

    Args:
        view: Pages of the values.
        fine: Result of the attention over the chosen tokens: output (N, G, d), rows m and l (N, G, 2), and the expected
            error of its codes relative to its norm, (N, G). Output and rows are updated to those of all tokens.
        choice: Chosen tokens (N, k), valid tokens of each stream (N,), and the groups of value pages to read (N,
            groups).
        scores: Scores of all tokens; the weights of the chosen tokens are set to 0.
        v_mean: Mean of V over all tokens, (N, d), which represents groups that are not read.
        threads: Number of threads for the streams.

    Returns:
        The share of each row's weight that has no page, (N, G) float32, and the expected error of each output from its
        codes, relative to its norm, (N, G).
    """
    form = progressive_form(view)
    lost, errors = np.empty(scores.tops.shape, np.float32), np.empty(scores.tops.shape, np.float32)
    shape = ValueForm(form.m, form.v_bits, form.sizes_bytes, form.value_header, form.bf16), form.value_tokens
    arguments = _place(view), view.maps["values"], choice, tuple(scores), v_mean, view.seq_lens, shape
    over_streams(_attend_coarse, threads, len(lost), (*arguments, fine, lost, errors))
    return lost, errors
