"""argtopk: selection of channels of q and of tokens. Among equal values, the lowest index always wins."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from attention_engine._exp import exp, exponentials, largest, smallest
from attention_engine._parallel import over_streams
from attention_engine._rows import WIDTH
from csd_io.compiled import njit
from csd_spec.arrays import F32, I32, I64

_SHIFT = np.uint32(20)
BINS = 1 << 12  # sign, exponent and three bits of the mantissa
MIN_SHARE_WITHOUT_SINK = np.float32(1e-20)  # lower bound next to a sink, so that the tokens of a query keep their order
UNDERFLOW_LOGIT = np.float32(-80)  # relative to the top: e^-80 over any number of tokens is a float32


class GroupScore(IntEnum):
    """Quantity that a query group sums to rank tokens."""

    SOFTMAX = 0  # approximate attention weights (Algorithm 1)
    LOGITS = 1  # approximate logits (SparQ's reference implementation)


@njit(cache=True, nogil=True)
def _ordered(value):  # type: ignore[no-untyped-def]
    """Return a uint32 that sorts like the float32 value; -0 equals +0, NaN sorts lowest."""
    if value != value:
        return np.uint32(0)
    bits = np.float32(value + np.float32(0)).view(np.uint32)
    return ~bits if bits >> 31 else bits | np.uint32(0x80000000)


@njit(cache=True, nogil=True)
def _digit(counts, left):  # type: ignore[no-untyped-def]
    """Return the bin that contains the `left`-th largest entry, and the rank of that entry in the bin."""
    digit = counts.size - 1
    while counts[digit] < left:
        left -= counts[digit]
        digit -= 1
    return digit, left


@njit(cache=True, nogil=True, error_model="numpy")
def _top(scores, size, k, out, keys, counts):  # type: ignore[no-untyped-def]
    """Write the indices of the k largest of scores[:size], ascending, to out[:k].

    Histograms of the leading 12 bits and of two groups of 10 bits of the key find the k-th value; one more pass
    collects the indices. keys (S,) and counts (BINS,) are scratch.
    """
    if k == size:
        for i in range(k):
            out[i] = i
        return
    if k == 0:
        return
    counts[:] = 0
    for i in range(size):
        keys[i] = _ordered(scores[i])
        counts[keys[i] >> _SHIFT] += 1
    digit, left = _digit(counts, k)
    inside = np.empty(counts[digit], np.uint32)
    count = 0
    for i in range(size):
        if keys[i] >> _SHIFT == digit:
            inside[count] = keys[i]
            count += 1
    for shift in (np.uint32(10), np.uint32(0)):
        counts[:] = 0
        for i in range(count):
            counts[inside[i] >> shift & np.uint32(1023)] += 1
        digit, left = _digit(counts, left)
        greater = 0
        for i in range(count):
            if inside[i] >> shift & np.uint32(1023) == digit:
                inside[greater] = inside[i]
                greater += 1
        count = greater
    last, taken = inside[0], 0  # the k-th largest; of equal keys, the first `left` are taken
    for i in range(size):
        mine = keys[i] > last
        if keys[i] == last and left > 0:
            left -= 1
            mine = True
        if mine:
            out[taken] = i
            taken += 1


@njit(cache=True, nogil=True)
def _top_channels(begin, end, q, r, out):  # type: ignore[no-untyped-def]
    _, queries, d = q.shape
    size, keys, counts = np.empty(d, np.float32), np.empty(d, np.uint32), np.empty(BINS, np.int64)
    for stream in range(begin, end):
        size[:] = 0
        for query in range(queries):
            for channel in range(d):
                size[channel] += abs(q[stream, query, channel])
        _top(size, d, r, out[stream], keys, counts)


@njit(cache=True, nogil=True, error_model="numpy")
def _span(row, size):  # type: ignore[no-untyped-def]
    """Return the largest and the smallest value of row[:size]."""
    whole = size // WIDTH * WIDTH
    top, low = largest(np.uint64(row.ctypes.data), whole), smallest(np.uint64(row.ctypes.data), whole)
    for t in range(whole, size):
        top, low = max(top, row[t]), min(low, row[t])
    return top, low


@njit(cache=True, nogil=True, error_model="numpy")
def _softmax(row, size, top):  # type: ignore[no-untyped-def]
    """Replace logits row[:size] by their softmax and return its denominator. `top` is the largest logit."""
    whole = size // WIDTH * WIDTH
    total = exponentials(np.uint64(row.ctypes.data), whole, top)
    for t in range(whole, size):
        row[t] = exp(row[t] - top)
        total += row[t]
    for t in range(size):
        row[t] /= total
    return total


@njit(cache=True, nogil=True, error_model="numpy")
def _below(logits, tops, size):  # type: ignore[no-untyped-def]
    """Return the distances of the logits (G, S) of the first `size` tokens from the top, for the closest query."""
    below = np.full(size, -np.inf, np.float32)
    for query in range(tops.size):
        for t in range(size):
            below[t] = max(below[t], logits[query, t] - tops[query])
    return below


@njit(cache=True, nogil=True, error_model="numpy")
def share_without_sink(total, top, sink):  # type: ignore[no-untyped-def]
    """Return the share of the softmax weight without the sink. total: sum of e^(logit - top)."""
    if sink <= top:
        return total / (total + exp(sink - top))
    total *= exp(top - sink)
    return total / (total + np.float32(1))


@njit(cache=True, nogil=True, error_model="numpy")
def _softmax_scores(begin, end, weights, seq_lens, by_logits, sinks, scores):  # type: ignore[no-untyped-def]
    """Compute softmax of each row. Scores are sums of logits, or of weights without the share of the sink.

    Weights that underflow in float32 are ordered by logit, after all others. If the logits of one query are all near
    its top, no weight underflows.
    """
    queries = weights.shape[1]
    tops = np.empty(queries, np.float32)
    for stream in range(begin, end):
        length, score, ordered = seq_lens[stream], scores[stream], by_logits
        score[:length], score[length:] = 0, -np.inf
        for query in range(queries):
            tops[query], low = _span(weights[stream, query], length)
            ordered |= low - tops[query] > UNDERFLOW_LOGIT
        below = _below(weights[stream], tops, 0 if ordered else length)
        for query in range(queries):
            row = weights[stream, query]
            if by_logits:
                for t in range(length):
                    score[t] += row[t]
            total, share = _softmax(row, length, tops[query]), np.float32(1)
            if sinks is not None:
                share = max(share_without_sink(total, tops[query], sinks[stream, query]), MIN_SHARE_WITHOUT_SINK)
            if not by_logits:
                for t in range(length):
                    score[t] += share * row[t]
        for t in range(below.size):
            score[t] = score[t] if score[t] > 0 else below[t]


@njit(cache=True, nogil=True, error_model="numpy")
def _top_tokens(begin, end, scores, seq_lens, k, recent, out):  # type: ignore[no-untyped-def]
    keys, counts = np.empty(scores.shape[1], np.uint32), np.empty(BINS, np.int64)
    for stream in range(begin, end):
        old = seq_lens[stream] - recent[stream]
        chosen = k[stream] - recent[stream]
        _top(scores[stream], old, chosen, out[stream], keys, counts)
        for i in range(recent[stream]):
            out[stream, chosen + i] = old + i


@njit(cache=True, nogil=True, error_model="numpy")
def _top_pages(begin, end, scores, seq_lens, n, pages, recent, p, out, counts):  # type: ignore[no-untyped-def]
    """Write the tokens of the best pages of streams [begin, end), ascending, to `out`, and their number to `counts`.

    Full pages before the first page with a recent token compete by the sum of their token scores. Later pages and the
    incomplete page are always taken. If p < 1, the best pages are taken in descending order until the taken pages hold
    a share p of all scores.
    """
    groups = (scores.shape[1] + n - 1) // n
    value, keys, bins = np.empty(groups, np.float32), np.empty(groups, np.uint32), np.empty(BINS, np.int64)
    best = np.empty(groups, np.int32)
    for stream in range(begin, end):
        length = seq_lens[stream]
        whole = length // n  # the rest is in drive DRAM and costs no page
        first = min(whole, (length - recent[stream]) // n)
        wanted = max(0, min(pages[stream] - (whole - first), first))
        for page in range(first):
            sum_ = np.float32(0)
            for t in range(page * n, (page + 1) * n):
                sum_ += max(scores[stream, t], np.float32(0))
            value[page] = sum_
        _top(value, first, wanted, best, keys, bins)
        if p < 1:
            mass = np.float32(0)
            for t in range(length):
                mass += max(scores[stream, t], np.float32(0))
            mass *= p
            for t in range(first * n, length):
                mass -= max(scores[stream, t], np.float32(0))
            order = np.argsort(-value[best[:wanted]], kind="mergesort")  # stable: the lowest index first among equals
            needed = 0
            while needed < wanted and mass > 0:
                mass -= value[best[order[needed]]]
                needed += 1
            best[:needed] = np.sort(best[order[:needed]])
            wanted = needed
        count = 0
        for i in range(wanted):
            for t in range(best[i] * n, (best[i] + 1) * n):
                out[stream, count] = t
                count += 1
        for t in range(first * n, length):
            out[stream, count] = t
            count += 1
        counts[stream] = count


@njit(cache=True, nogil=True, error_model="numpy")
def _top_mass(begin, end, scores, tokens, counts, p, recent, seq_lens, out, kept):  # type: ignore[no-untyped-def]
    """Take the recent tokens of tokens[:counts] and then the best, until they hold a share p of all their scores.

    The taken tokens are written to `out`, ascending, and their number to `kept`.
    """
    for stream in range(begin, end):
        count, old = counts[stream], seq_lens[stream] - recent[stream]
        value = np.empty(count, np.float32)
        whole = np.float32(0)
        for i in range(count):
            value[i] = max(scores[stream, tokens[stream, i]], np.float32(0))
            whole += value[i]
        order = np.argsort(-value, kind="mergesort")  # stable: the lowest index first among equals
        taken, mass = np.zeros(count, np.bool_), np.float32(0)
        for i in range(count):
            if tokens[stream, i] >= old:
                taken[i] = True
                mass += value[i]
        for i in order:
            if mass >= p * whole:
                break
            if not taken[i]:
                taken[i] = True
                mass += value[i]
        found = 0
        for i in range(count):
            if taken[i]:
                out[stream, found] = tokens[stream, i]
                found += 1
        kept[stream] = found


@njit(cache=True, nogil=True, error_model="numpy")
def _selected_mass(begin, end, weights, tokens, counts, out):  # type: ignore[no-untyped-def]
    for stream in range(begin, end):
        for query in range(weights.shape[1]):
            mass = np.float32(0)
            for i in range(counts[stream]):
                mass += weights[stream, query, tokens[stream, i]]
            out[stream, query] = min(mass, np.float32(1))


def top_channels(q: F32, r: int, threads: int = 1) -> I32:
    """Return the r channels with the largest |q| summed over the query group, ascending (Algorithm 1, step 1).

    q: (N, G, d) float32. Returns (N, r) int32.
    """
    out: I32 = np.empty((q.shape[0], r), np.int32)
    over_streams(_top_channels, threads, q.shape[0], (q, r, out))
    return out


def softmax_scores(
    logits: F32,
    seq_lens: I64,
    group_score: GroupScore = GroupScore.SOFTMAX,
    threads: int = 1,
    sinks: F32 | None = None,
) -> F32:
    """Compute token scores (N, S) float32, summed over the query group (steps 4 and 6).

    Weights that underflow in float32 get a negative score: the distance of their best logit from the top. Scores after
    the end of a stream are -inf.

    Args:
        logits: (N, G, S) float32; replaced by their softmax.
        seq_lens: Tokens of each stream, (N,).
        group_score: Quantity to sum over the query group.
        threads: Number of threads for the streams.
        sinks: Sink logits (N, G); their share of the weight of a query is excluded from the scores.
    """
    scores: F32 = np.empty((logits.shape[0], logits.shape[2]), np.float32)
    over_streams(
        _softmax_scores, threads, logits.shape[0], (logits, seq_lens, group_score == GroupScore.LOGITS, sinks, scores)
    )
    return scores


def best_tokens(scores: F32, seq_lens: I64, k: I64, recent: I64, threads: int = 1) -> I32:
    """Return the `recent` last tokens and the best other tokens, k in total, ascending (steps 5 and 6).

    scores: (N, S) float32; seq_lens, k, recent: (N,), recent <= k <= seq_lens. Returns (N, max k) int32; k of them are
    valid.
    """
    tokens: I32 = np.zeros((scores.shape[0], int(k.max())), np.int32)
    over_streams(_top_tokens, threads, scores.shape[0], (scores, seq_lens, k, recent, tokens))
    return tokens


def top_pages(
    scores: F32, seq_lens: I64, n: int, pages: I64, recent: I64, p: float = 1.0, threads: int = 1
) -> tuple[I32, I64]:
    """Return all tokens of the `pages` token pages with the largest score sums, and all tokens that are not in flash.

    Pages with the `recent` last tokens are included. If p < 1, only the fewest of these pages that hold a share p of
    all scores are taken. Returns tokens (N, k) int32, ascending, and the number of valid tokens, (N,).
    """
    longest = int(min(scores.shape[1], n * (pages.max() + 2) + recent.max()))
    tokens, counts = np.zeros((scores.shape[0], longest), np.int32), np.empty(scores.shape[0], np.int64)
    over_streams(
        _top_pages, threads, scores.shape[0], (scores, seq_lens, n, pages, recent, np.float32(p), tokens, counts)
    )
    return tokens, counts


def top_mass(
    scores: F32, tokens: I32, counts: I64, p: float, seq_lens: I64, recent: I64, threads: int = 1
) -> tuple[I32, I64]:
    """Return the fewest of tokens (N, k) that hold a share p of their scores, including the `recent` last tokens.

    Returns tokens (N, k), ascending, and the number of valid tokens, (N,).
    """
    out, kept = np.zeros_like(tokens), np.empty_like(counts)
    arguments = scores, tokens, counts, np.float32(p), recent, seq_lens, out, kept
    over_streams(_top_mass, threads, scores.shape[0], arguments)
    return out, kept


def selected_mass(weights: F32, tokens: I32, counts: I64, threads: int = 1) -> F32:
    """Return the weight of selected tokens, alpha (N, G) (step 7).

    weights: (N, G, S); tokens: (N, k); counts (N,) of them are valid.
    """
    out: F32 = np.empty(weights.shape[:2], np.float32)
    over_streams(_selected_mass, threads, weights.shape[0], (weights, tokens, counts, out))
    return out
