"""argtopk: which channels of q, and which tokens. Ties go to the lowest index, everywhere."""

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
LEAST_KEPT = np.float32(1e-20)  # by a sink, so that a query's tokens keep their order
WEIGHTLESS = np.float32(-80)  # from the top: e^-80 over any number of tokens still is an FP32 number


class GroupScore(IntEnum):
    """What a query group sums to rank tokens."""

    SOFTMAX = 0  # approximate attention weights (Algorithm 1)
    LOGITS = 1  # approximate logits (SparQ's reference implementation)


@njit(cache=True, nogil=True)
def _ordered(value):  # type: ignore[no-untyped-def]
    """A uint32 that sorts as the FP32 value does; -0 equals +0, NaN sorts lowest."""
    if value != value:
        return np.uint32(0)
    bits = np.float32(value + np.float32(0)).view(np.uint32)
    return ~bits if bits >> 31 else bits | np.uint32(0x80000000)


@njit(cache=True, nogil=True)
def _digit(counts, left):  # type: ignore[no-untyped-def]
    """The highest bin at which bins from the top on hold `left`, and how many of that bin are among these."""
    digit = counts.size - 1
    while counts[digit] < left:
        left -= counts[digit]
        digit -= 1
    return digit, left


@njit(cache=True, nogil=True, error_model="numpy")
def _top(scores, size, k, out, keys, counts):  # type: ignore[no-untyped-def]
    """Indices of the k largest of scores[:size], ascending, into out[:k].

    Histograms of the key's leading 12 bits and of twice ten more find the k-th, whatever the scores are; one more pass
    the indices. keys (S,) and counts (BINS,) are scratch.
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
    found = 0
    for i in range(size):
        if keys[i] >> _SHIFT == digit:
            inside[found] = keys[i]
            found += 1
    for shift in (np.uint32(10), np.uint32(0)):
        counts[:] = 0
        for i in range(found):
            counts[inside[i] >> shift & np.uint32(1023)] += 1
        digit, left = _digit(counts, left)
        kept = 0
        for i in range(found):
            if inside[i] >> shift & np.uint32(1023) == digit:
                inside[kept] = inside[i]
                kept += 1
        found = kept
    last, taken = inside[0], 0  # the k-th largest; of those equal to it the first `left` are taken
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
    """Largest and smallest of row[:size]."""
    whole = size // WIDTH * WIDTH
    top, low = largest(np.uint64(row.ctypes.data), whole), smallest(np.uint64(row.ctypes.data), whole)
    for t in range(whole, size):
        top, low = max(top, row[t]), min(low, row[t])
    return top, low


@njit(cache=True, nogil=True, error_model="numpy")
def _softmax(row, size, top):  # type: ignore[no-untyped-def]
    """Replace logits row[:size], the largest of which is `top`, by their softmax; returns the sum under that."""
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
    """How far logits (G, S) of the first `size` tokens are from the top, of the query to which each is nearest."""
    below = np.full(size, -np.inf, np.float32)
    for query in range(tops.size):
        for t in range(size):
            below[t] = max(below[t], logits[query, t] - tops[query])
    return below


@njit(cache=True, nogil=True, error_model="numpy")
def _kept(total, top, sink):  # type: ignore[no-untyped-def]
    """Of the softmax over logits, whose largest is `top`, and a sink, the share that is not the sink's. total: of
    e^(logit - top)."""
    if sink <= top:
        return total / (total + exp(sink - top))
    total *= exp(top - sink)
    return total / (total + np.float32(1))


@njit(cache=True, nogil=True, error_model="numpy")
def _weigh(begin, end, weights, seq_lens, by_logits, sinks, scores):  # type: ignore[no-untyped-def]
    """Softmax of each row; scores are sums of logits, or of weights, of which a sink has taken its share.

    Weights too small for FP32 still have an order, behind all others. There are none where one query's logits are all
    near its top.
    """
    queries = weights.shape[1]
    tops = np.empty(queries, np.float32)
    for stream in range(begin, end):
        length, score, ordered = seq_lens[stream], scores[stream], by_logits
        score[:length], score[length:] = 0, -np.inf
        for query in range(queries):
            tops[query], low = _span(weights[stream, query], length)
            ordered |= low - tops[query] > WEIGHTLESS
        below = _below(weights[stream], tops, 0 if ordered else length)
        for query in range(queries):
            row = weights[stream, query]
            if by_logits:
                for t in range(length):
                    score[t] += row[t]
            total, kept = _softmax(row, length, tops[query]), np.float32(1)
            if sinks is not None:
                kept = max(_kept(total, tops[query], sinks[stream, query]), LEAST_KEPT)
            if not by_logits:
                for t in range(length):
                    score[t] += kept * row[t]
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
    """Tokens of the best pages of streams [begin, end), ascending, into `out`, and how many into `counts`.

    Full pages up to the first with a recent token compete, by the sum of their tokens' scores; those behind it and the
    page that is not full yet are taken anyway. With p < 1 the best pages are taken in the order of their value until
    what is taken holds a share p of all scores.
    """
    groups = (scores.shape[1] + n - 1) // n
    value, keys, bins = np.empty(groups, np.float32), np.empty(groups, np.uint32), np.empty(BINS, np.int64)
    best = np.empty(groups, np.int32)
    for stream in range(begin, end):
        length = seq_lens[stream]
        whole = length // n  # the rest waits in drive DRAM and costs no page
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
        found = 0
        for i in range(wanted):
            for t in range(best[i] * n, (best[i] + 1) * n):
                out[stream, found] = t
                found += 1
        for t in range(first * n, length):
            out[stream, found] = t
            found += 1
        counts[stream] = found


@njit(cache=True, nogil=True, error_model="numpy")
def _top_mass(begin, end, scores, tokens, counts, p, recent, seq_lens, out, kept):  # type: ignore[no-untyped-def]
    """Of tokens[:counts] the recent ones and then the best, until they hold a share p of the scores of all of them.

    What is kept goes ascending into `out`, how many into `kept`.
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
def _cover(begin, end, weights, tokens, counts, out):  # type: ignore[no-untyped-def]
    for stream in range(begin, end):
        for query in range(weights.shape[1]):
            kept = np.float32(0)
            for i in range(counts[stream]):
                kept += weights[stream, query, tokens[stream, i]]
            out[stream, query] = min(kept, np.float32(1))


def top_channels(q: F32, r: int, threads: int = 1) -> I32:
    """The r channels with the largest |q| summed over the query group, ascending (Algorithm 1, step 1).

    q: (N, G, d) float32. Returns (N, r) int32.
    """
    out: I32 = np.empty((q.shape[0], r), np.int32)
    over_streams(_top_channels, threads, q.shape[0], (q, r, out))
    return out


def weigh(
    logits: F32,
    seq_lens: I64,
    group_score: GroupScore = GroupScore.SOFTMAX,
    threads: int = 1,
    sinks: F32 | None = None,
) -> F32:
    """Scores of tokens, (N, S) float32, summed over the query group (steps 4 and 6).

    logits: (N, G, S) float32, overwritten by their softmax. Weights that vanish in FP32 score by how far their best
    logit is from its query's top, below zero. Beyond a stream's length -inf. sinks (N, G): logits beside those of the
    tokens, whose share of a query's weight its scores do without.
    """
    scores: F32 = np.empty((logits.shape[0], logits.shape[2]), np.float32)
    over_streams(_weigh, threads, logits.shape[0], (logits, seq_lens, group_score == GroupScore.LOGITS, sinks, scores))
    return scores


def best_tokens(scores: F32, seq_lens: I64, k: I64, recent: I64, threads: int = 1) -> I32:
    """The `recent` last tokens and the best others, k in all, ascending (steps 5 and 6).

    scores: (N, S) float32; seq_lens, k, recent: (N,), recent <= k <= seq_lens. Returns (N, max k) int32, of which k
    are used.
    """
    tokens: I32 = np.zeros((scores.shape[0], int(k.max())), np.int32)
    over_streams(_top_tokens, threads, scores.shape[0], (scores, seq_lens, k, recent, tokens))
    return tokens


def top_pages(
    scores: F32, seq_lens: I64, n: int, pages: I64, recent: I64, p: float = 1.0, threads: int = 1
) -> tuple[I32, I64]:
    """All tokens of the `pages` token pages whose tokens' scores sum up highest, and of those not in flash yet.

    Pages with the `recent` last tokens count among them. With p < 1 only the fewest of these pages that hold a share p
    of all scores. Returns tokens (N, k) int32, ascending, and how many of
    them are used, (N,).
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
    """Of tokens (N, k) the fewest that hold a share p of their scores, the `recent` last of all among them.

    Returns tokens (N, k), ascending, and how many of them are used, (N,).
    """
    out, kept = np.zeros_like(tokens), np.empty_like(counts)
    arguments = scores, tokens, counts, np.float32(p), recent, seq_lens, out, kept
    over_streams(_top_mass, threads, scores.shape[0], arguments)
    return out, kept


def cover(weights: F32, tokens: I32, counts: I64, threads: int = 1) -> F32:
    """Weight of selected tokens, alpha (N, G) (step 7): weights (N, G, S), tokens (N, k), of which counts (N,)."""
    out: F32 = np.empty(weights.shape[:2], np.float32)
    over_streams(_cover, threads, weights.shape[0], (weights, tokens, counts, out))
    return out
