"""Kernels over score pages and value pages where they lie (`csd_spec.progressive`): all of K and V in few bits.

All sums are of integers. A logit is (offset x 2^-20 + unit x sum of factor x digit) / sqrt(d) - variance / 2: a factor
is an int8 multiple of q x scale x 4^level, under one power of two a page and query; offset is the sum over channels of
q x least, each in multiples of 2^-20. variance is that of the error that codes make in a logit, and half of it what
that adds to the weight of a token on average: the mean of e^(x + error) is e^(x + variance / 2). A weight times its
token's size is an int8 multiple of a unit a page and query; what rounding takes from one token goes to the 16th behind
it, so that no weight is lost where many are small.
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
from attention_engine._rows import ask, bare
from attention_engine._weights import add_values, round_weights, sum_values2, sum_values4
from attention_engine.kernels import _page, _place
from attention_engine.refined import _at, _four, progressive_form, run_form, score_rows
from attention_engine.spend import VARIANCE
from csd_io.compiled import njit
from csd_io.rotation import rotate_back
from csd_spec import KvView
from csd_spec.arrays import F32, I32, I64, Bools
from csd_spec.progressive import DIGITS, LANES, QUAD, RESTS
from csd_spec.view import UNMAPPED

ENERGY = 0.715, 8.8  # of a value of V in 2 and 4 bits, squared, in sizes of its token; normally distributed
NOISE = ENERGY[0] * VARIANCE[2], ENERGY[1] * VARIANCE[4]  # of its error


@njit(inline="always")
def _in_passes(queries, first):  # type: ignore[no-untyped-def]
    """How many queries from `first` on share the next pass: 4, 2 or 1."""
    left = queries - first
    return 4 if left >= 4 else 2 if left >= 2 else 1


@njit(inline="always")
def _two(at, stride):  # type: ignore[no-untyped-def]
    """Addresses of two rows."""
    return at, at + stride


@njit(cache=True, nogil=True)
def _take_queries(q, m, rows, powers):  # type: ignore[no-untyped-def]
    """q (G, d) as `read_header` takes it, rows (parts, passes, 4, ...), and as `fill_factors` does: powers (parts,
    passes, m, 16), 4^0 to 4^3 times four queries a pass."""
    rows[:], powers[:] = 0, 0
    for query in range(q.shape[0]):
        for channel in range(q.shape[1]):
            rows[channel // m, query // QUERIES, query % QUERIES, channel % m] = q[query, channel]
            for level in range(DIGITS):
                value = q[query, channel] * np.float32(1 << 2 * level)
                powers[channel // m, query // QUERIES, channel % m, QUERIES * level + query % QUERIES] = value


@njit(cache=True, nogil=True, error_model="numpy")
def _score_blocks(out, factors, lines, shape, numbers, first, some):  # type: ignore[no-untyped-def]
    """Add the logits of blocks of 16 tokens of `some` queries, the first of which is number `first` of a pass.

    out: address of its logits, bytes from those to the next one's, and whether none are there. lines: see `add_scores`,
    and how far behind lies what is asked for meanwhile.
    """
    (at, each, fresh), (place, ahead), ((u0, u1, u2, _), (o0, o1, o2, _)) = out, lines, numbers
    if some == 4:
        add_scores(_four(at, each), fresh, factors, place, ahead, shape, numbers)
    elif some == 2:
        add_scores(_two(at, each), fresh, factors, place, ahead, shape, ((u0, u1), (o0, o1)))
    elif first == 0:
        add_scores((at,), fresh, factors, place, ahead, shape, ((u0,), (o0,)))
    else:
        add_scores((at,), fresh, factors + np.uint64(8), place, ahead, shape, ((u2,), (o2,)))


@njit(cache=True, nogil=True, error_model="numpy")
def _score_page(page, form, asking, scale, scratch, out, tokens, variances):  # type: ignore[no-untyped-def]
    """Add the logits of the first tokens of a page, and the variances of their errors, times the tokens, to variances
    (G,).

    page: its address, and how far behind lies the page that is asked for meanwhile. asking: addresses of its channels'
    rows and powers in `_take_queries`, and bytes of a pass of each. scratch: addresses. out: see `_score_blocks`.
    """
    (m, digits, header_bytes, brain), (place, ahead), ((rows, row_bytes), (powers, pass_bytes)) = form, page, asking
    factors, entries, line, scales = scratch
    (at, each, fresh), queries, whole = out, variances.size, tokens // LANES
    lines, number, half = place + np.uint64(header_bytes), digits // LANES, scale * scale / np.float32(2)
    for first in range(0, queries, QUERIES):
        number_of = np.uint64(first // QUERIES)
        (o0, o1, o2, o3), missed = read_header(scales, place, brain, rows + number_of * row_bytes, m)
        (u0, u1, u2, u3), rounding = fill_factors(
            factors, entries, scales, place, powers + number_of * pass_bytes, m, digits
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
            _score_blocks((mine, each, fresh), factors, (lines, ahead), (number, whole), numbers, taken, some)
            if whole * LANES < tokens:
                rest, there = lines + np.uint64(4 * whole * digits), (line, np.uint64(4 * LANES), True)
                _score_blocks(there, factors, (rest, ahead), (number, 1), numbers, taken, some)
                add_rows_of(mine + np.uint64(4 * LANES * whole), each, fresh, line, some, tokens - whole * LANES)
            taken += some


@njit(inline="always")
def _ahead(place, page, slots, stream, part, group, header_bytes):  # type: ignore[no-untyped-def]
    """How far behind a page lies the next part of its group, or the first of the next group; its header is asked
    for."""
    part += 1
    if part == slots.shape[1]:
        part, group = 0, group + 1
    if group == slots.shape[2] or slots[stream, part, group] == UNMAPPED:
        return np.uint64(0)
    following = bare(_page(place, slots[stream, part, group]))
    ask((following,), header_bytes)
    return following - page


@njit(cache=True, nogil=True, error_model="numpy")
def _score_stream(place, slots, stream, tokens, form, exact, q, asking, scratch, out, variances):  # type: ignore[no-untyped-def]
    """Logits (G, S) of a stream's tokens for q (G, d), and the variances (G,) of their errors, times the tokens.

    Addresses are taken once, as who holds an array is counted whenever one is: that takes as long as half a page.
    asking: as `_take_queries` has them. exact: what `score_rows` takes, for tokens that no score page holds.
    """
    (m, T, digits, header_bytes, brain), (k_slots, refined, runs) = form, exact
    factors, entries, line, scales = scratch
    scale, shape = np.float32(1 / math.sqrt(q.shape[1])), (m, digits, header_bytes, brain)
    buffers = _at(factors), _at(entries), _at(line), _at(scales)
    (rows, powers), passes = asking, np.uint64(asking[0].shape[1])
    row_at, row_bytes = _at(rows), np.uint64(4 * QUERIES * rows.shape[3])
    power_at, pass_bytes = _at(powers), np.uint64(4 * LANES * m)
    at, each = _at(out), np.uint64(4 * out.shape[1])
    for first in range(0, tokens, T):
        group, last = first // T, min(first + T, tokens)
        if slots[stream, 0, group] == UNMAPPED:
            score_rows(place, k_slots[stream], refined[stream], runs, q, (first, last), out)
            continue
        for part in range(slots.shape[1]):
            page, mine = bare(_page(place, slots[stream, part, group])), at + np.uint64(4 * first)
            behind = page, _ahead(place, page, slots, stream, part, group, header_bytes)
            before = np.uint64(part) * passes
            these = (row_at + before * row_bytes, row_bytes), (power_at + before * pass_bytes, pass_bytes)
            _score_page(behind, shape, these, scale, buffers, (mine, each, part == 0), last - first, variances)


@njit(cache=True, nogil=True, error_model="numpy")
def _score(begin, end, place, slots, exact, seq_lens, form, q, out, variances):  # type: ignore[no-untyped-def]
    """Logits of streams [begin, end); arguments as in `score`."""
    (m, _, digits, _, _), queries = form, q.shape[1]
    factors, entries = np.empty(QUERIES * digits, np.int8), np.empty(QUERIES * (digits + DIGITS), np.float32)
    width, passes = (m + LANES - 1) // LANES * LANES, (queries + QUERIES - 1) // QUERIES
    scratch = factors, entries, np.empty((QUERIES, LANES), np.float32), np.empty(width, np.float32)
    rows = np.empty((slots.shape[1], passes, QUERIES, width), np.float32)
    asking = rows, np.empty((slots.shape[1], passes, m, LANES), np.float32)
    for stream in range(begin, end):
        found, length = variances[stream], seq_lens[stream]
        found[:] = 0
        _take_queries(q[stream], m, *asking)
        _score_stream(place, slots, stream, length, form, exact, q[stream], asking, scratch, out[stream], found)
        for query in range(queries):
            found[query] /= np.float32(length)


@njit(inline="always")
def _add_queries(page, addresses, of_rows):  # type: ignore[no-untyped-def]
    """Add what a value page's tokens weigh to sums of some queries, and the squares of weights x sizes to theirs.

    page: bits of a value, addresses of sizes and rests, tokens, lines of a block and blocks, address of the first line,
    how far behind lies what is asked for meanwhile. addresses: of weights, of scratch for their multiples and for sums
    of codes, and of sums, a tuple of each. of_rows: addresses of the sums of the weights, and of the squares.
    """
    bits, sizes, rests, tokens, (lines, blocks), place, ahead = page
    weights, multiples, found, sums = addresses
    numbers = round_weights(weights, sizes, tokens, (tokens + LANES - 1) // LANES, multiples)
    if bits == 2:
        sum_values2(found, multiples, place, ahead, lines, blocks)
    else:
        sum_values4(found, multiples, place, ahead, lines, blocks)
    add_values(sums, of_rows, found, rests, lines, np.float32((1 << bits) - 1), numbers)


@njit(cache=True, nogil=True, error_model="numpy")
def _add_page(page, form, weights, tokens, scratch, sums, of_rows, queries):  # type: ignore[no-untyped-def]
    """Add what a value page's tokens weigh to sums, rotated as they are stored, and the squares of weights x sizes to
    theirs. All are addresses: to count who holds an array takes longer than a page.

    page: its address, and how far behind lies the page that is asked for meanwhile. weights, sums: address of those of
    the first query, and bytes to the next one's. of_rows: see `_add_queries`.
    """
    (m, bits, sizes_bytes, header_bytes, brain), (at, each), (to, row), first = form, weights, sums, 0
    (place, ahead), (sizes, rests, multiples, found) = page, scratch
    lines, block, size = (m + LANES - 1) // LANES, QUAD * 8 // bits, np.uint64((tokens + LANES - 1) // LANES * LANES)
    widen_halves(sizes, place, tokens, brain)
    square_codes(rests, place + np.uint64(sizes_bytes), m, largest_of(sizes, tokens) * RESTS)
    shape = lines, (tokens + block - 1) // block
    mine = bits, sizes, rests, tokens, shape, place + np.uint64(header_bytes), ahead
    while first < queries:
        some, w, s = _in_passes(queries, first), at + np.uint64(first) * each, to + np.uint64(first) * row
        added = of_rows[0] + np.uint64(4 * first), of_rows[1] + np.uint64(4 * first)
        if some == 4:
            _add_queries(mine, (_four(w, each), _four(multiples, size), _four(found, row), _four(s, row)), added)
        elif some == 2:
            _add_queries(mine, (_two(w, each), _two(multiples, size), _two(found, row), _two(s, row)), added)
        else:
            _add_queries(mine, ((w,), (multiples,), (found,), (s,)), added)
        first += some


@njit(cache=True, nogil=True, error_model="numpy")
def _merge(out, rows, sums, scores, weights, v_mean):  # type: ignore[no-untyped-def]
    """Join a row attended in 8 bits, out (d,) with rows m and l (2,), with what is left; returns the share of the
    weight that is left out, and the shares of what is attended in 8 bits and of a weight of e^0 under the largest
    score.

    sums (d,): of the others, in few bits, under their largest logit. scores: that; weights: of what the sums stand for,
    and of what the mean of V stands for.
    """
    fine, (kept, left) = rows[0], weights
    top = max(fine, scores)
    a = rows[1] * exp(fine - top) if rows[1] > 0 else np.float32(0)
    b = exp(scores - top) if kept + left > 0 else np.float32(0)
    whole = a + b * (kept + left)
    for channel in range(out.size):
        out[channel] = (a * out[channel] + b * (sums[channel] + left * v_mean[channel])) / whole
    rows[0], rows[1] = top, whole
    return b * left / whole, a / whole, b / whole


@njit(cache=True, nogil=True, error_model="numpy")
def _add_stream(place, slots, reads, stream, weights, length, form, scratch, found):  # type: ignore[no-untyped-def]
    """Add up what a stream's tokens weigh, weights (G, S): what is read in found, (parts, G, ...) sums, (2, G) weights
    read and not read, and (G,) squares of weights x sizes."""
    (page_form, per_page), (sums, shares, squares), (sizes, rests, multiples, values, masses) = form, found, scratch
    queries, buffers = squares.size, (_at(sizes), _at(rests), _at(multiples), _at(values))
    to, row, of_rows = _at(sums), np.uint64(4 * sums.shape[2]), (_at(masses), _at(squares))
    at, each = _at(weights), np.uint64(4 * weights.shape[1])
    for first in range(0, length, per_page):
        group, count, mine = first // per_page, min(per_page, length - first), at + np.uint64(4 * first)
        if slots[stream, 0, group] == UNMAPPED:
            continue
        for query in range(queries):
            masses[query] = total_of(mine + np.uint64(query) * each, count)
            shares[0 if reads[stream, group] else 1, query] += masses[query]
        if reads[stream, group]:
            for part in range(slots.shape[1]):
                page = bare(_page(place, slots[stream, part, group]))
                ahead = _ahead(place, page, slots, stream, part, group, page_form[3])
                out = to + np.uint64(part * queries) * row, row
                _add_page((page, ahead), page_form, (mine, each), count, buffers, out, of_rows, queries)


@njit(cache=True, nogil=True, error_model="numpy")
def _attend_coarse(begin, end, place, slots, choice, scores, v_mean, seq_lens, form, fine, lost, errors):  # type: ignore[no-untyped-def]
    """`attend_coarse` of streams [begin, end)."""
    (page_form, per_page), (out, rows, of_codes), parts, (_, queries, d) = form, fine, slots.shape[1], fine[0].shape
    (tokens, counts, reads), (weights, tops, variances) = choice, scores
    m, bits = page_form[0], page_form[1]
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
        found = sums, shares, squares
        _add_stream(place, slots, reads, stream, weights[stream], seq_lens[stream], form, scratch, found)
        for query in range(queries):
            for part in range(parts):
                rotate_back(sums[part, query, :m])
                joined[part * m : (part + 1) * m] = sums[part, query, :m]
            share, top, mine = (shares[0, query], shares[1, query]), tops[stream, query], out[stream, query]
            length = of_codes[stream, query] * np.sqrt(squares_of(_at(mine), d))
            lost[stream, query], of_fine, each = _merge(mine, rows[stream, query], joined, top, share, v_mean[stream])
            missed = each * each * squares[query] * (of_v + variances[stream, query] * of_k)
            missed += (of_fine * length) ** 2
            size = np.sqrt(squares_of(_at(mine), d))
            errors[stream, query] = np.sqrt(missed) / size if size > 0 else np.float32(0)


class Scores(NamedTuple):
    """What scores of K in few bits say.

    Attributes:
        weights: e^(logit - largest) of all tokens, (N, G, S).
        tops: The largest logit, (N, G).
        variances: Of the errors of logits, (N, G).
    """

    weights: F32
    tops: F32
    variances: F32


_KEPT = threading.local()


def _scratch(*shape: int) -> F32:
    """A thread's array for logits: memory that is mapped anew in each step costs as much as a third of the scores."""
    size, kept = math.prod(shape), getattr(_KEPT, "logits", None)
    if kept is None or not size <= kept.size <= 4 * max(size, 1 << 16):
        kept = _KEPT.logits = np.empty(size, np.float32)
    logits: F32 = kept[:size].reshape(shape)
    return logits


def score(view: KvView, q: F32, threads: int = 1) -> tuple[F32, F32]:
    """Logits of all tokens by K in few bits.

    Args:
        view: Where K lies.
        q: Queries, (N, G, d) float32.
        threads: That share the streams.

    Returns:
        Logits, (N, G, max S) float32, good until the thread's next call, and the mean variance of their errors, (N, G).
        Tokens that no score page holds get exact ones; beyond a stream's length logits are undefined.
    """
    form, maps = progressive_form(view), view.maps
    out = _scratch(*q.shape[:2], int(view.seq_lens.max()))
    shape = form.m, form.T, form.D, form.header_bytes, form.bf16
    exact = view.k_slots, maps["refined"][:, 0], run_form(form)
    variances: F32 = np.empty(q.shape[:2], np.float32)
    arguments = _place(view), maps["scores"], exact, view.seq_lens, shape, np.ascontiguousarray(q), out, variances
    over_streams(_score, threads, q.shape[0], arguments)
    return out, variances


def attend_coarse(
    view: KvView,
    fine: tuple[F32, F32, F32],
    choice: tuple[I32, I64, Bools],
    scores: Scores,
    v_mean: F32,
    threads: int = 1,
) -> tuple[F32, F32]:
    """Add to attention over some tokens in 8 bits what all others weigh, by V in few bits.

    Args:
        view: Where V lies.
        fine: Of the attention over the chosen tokens: its output (N, G, d) and rows m and l (N, G, 2), which become
            those of all tokens, and what its codes are likely to add, as a share of its length, (N, G).
        choice: Those tokens (N, k), how many of them count (N,), and which groups of value pages (N, groups) are read.
        scores: Of all tokens; weights of the chosen ones become 0.
        v_mean: Mean of V over all tokens, (N, d), which stands for groups that are not read.
        threads: That share the streams.

    Returns:
        The share of each row's weight that no page was read for, (N, G) float32, and what codes are likely to add to
        each output, as a share of its length, (N, G).
    """
    form = progressive_form(view)
    lost, errors = np.empty(scores.tops.shape, np.float32), np.empty(scores.tops.shape, np.float32)
    shape = (form.m, form.v_bits, form.sizes_bytes, form.value_header, form.bf16), form.value_tokens
    arguments = _place(view), view.maps["values"], choice, tuple(scores), v_mean, view.seq_lens, shape
    over_streams(_attend_coarse, threads, len(lost), (*arguments, fine, lost, errors))
    return lost, errors
