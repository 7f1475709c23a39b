"""argtopk: which channels of q, and which tokens. Ties go to the lowest index, everywhere."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numba import njit
from numpy.typing import NDArray

from attention_engine._parallel import over_streams
from attention_engine._rows import LANES, exp, exponentials, largest

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

_SHIFT = np.uint32(20)
BINS = 1 << 12  # sign, exponent and three bits of the mantissa


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


@njit(cache=True, nogil=True, error_model="numpy")
def _top(scores, size, k, out, keys, counts):  # type: ignore[no-untyped-def]
    """Indices of the k largest of scores[:size], ascending, into out[:k].

    A histogram of the leading bits finds the bin of the k-th, a sort of that bin alone its value, one more pass the
    indices. keys (S,) and counts (BINS,) are scratch.
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
    digit, left = BINS - 1, k
    while counts[digit] < left:
        left -= counts[digit]
        digit -= 1
    inside = np.empty(counts[digit], np.uint32)
    found = 0
    for i in range(size):
        if keys[i] >> _SHIFT == digit:
            inside[found] = keys[i]
            found += 1
    inside.sort()
    last = inside[found - left]  # the k-th largest; of those equal to it the first `left` are taken
    for i in range(found - left + 1, found):
        left -= inside[i] > last
    found = 0
    for i in range(size):
        taken = keys[i] > last
        if keys[i] == last and left > 0:
            left -= 1
            taken = True
        if taken:
            out[found] = i
            found += 1


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
def _softmax(row, size, below):  # type: ignore[no-untyped-def]
    """Replace logits row[:size] by their softmax; below[t] becomes at least what token t's logit is from the top."""
    at, whole = np.uint64(row.ctypes.data), size // LANES * LANES
    top = largest(at, whole)
    for t in range(whole, size):
        top = max(top, row[t])
    for t in range(size):
        below[t] = row[t] - top if row[t] - top > below[t] else below[t]
    total = exponentials(at, whole, top)
    for t in range(whole, size):
        row[t] = exp(row[t] - top)
        total += row[t]
    for t in range(size):
        row[t] /= total


@njit(cache=True, nogil=True, error_model="numpy")
def _top_tokens(begin, end, weights, seq_lens, k, recent, by_logits, out, alpha):  # type: ignore[no-untyped-def]
    """`weights` holds logits on entry and softmax weights on exit."""
    queries, longest = weights.shape[1:]
    score, below = np.empty(longest, np.float32), np.empty(longest, np.float32)
    keys, counts = np.empty(longest, np.uint32), np.empty(BINS, np.int64)
    for stream in range(begin, end):
        length = seq_lens[stream]
        score[:length], below[:length] = 0, -np.inf
        for query in range(queries):
            row = weights[stream, query]
            if by_logits:
                for t in range(length):
                    score[t] += row[t]
            _softmax(row, length, below)
            if not by_logits:
                for t in range(length):
                    score[t] += row[t]
        if not by_logits:
            for t in range(length):  # weights too small for FP32 still have an order, behind all others
                score[t] = score[t] if score[t] > 0 else below[t]
        old = length - recent[stream]
        chosen = k[stream] - recent[stream]
        _top(score, old, chosen, out[stream], keys, counts)
        for i in range(recent[stream]):
            out[stream, chosen + i] = old + i
        for query in range(queries):
            kept = np.float32(0)
            for i in range(k[stream]):
                kept += weights[stream, query, out[stream, i]]
            alpha[stream, query] = min(kept, np.float32(1))


def top_channels(q: F32, r: int, threads: int = 1) -> I32:
    """The r channels with the largest |q| summed over the query group, ascending (Algorithm 1, step 1).

    q: (N, G, d) float32. Returns (N, r) int32.
    """
    out: I32 = np.empty((q.shape[0], r), np.int32)
    over_streams(_top_channels, threads, q.shape[0], (q, r, out))
    return out


def top_tokens(
    logits: F32,
    seq_lens: I64,
    k: I64,
    recent: I64,
    group_score: GroupScore = GroupScore.SOFTMAX,
    threads: int = 1,
) -> tuple[I32, F32]:
    """The `recent` last tokens and the best others, k in all, ascending, and their weight (steps 4 to 7).

    logits: (N, G, S) float32, overwritten by their softmax; seq_lens, k, recent: (N,), recent <= k <= seq_lens.
    Returns tokens (N, max k) int32, of which k are used, and alpha (N, G) float32.
    """
    tokens: I32 = np.zeros((logits.shape[0], int(k.max())), np.int32)
    alpha: F32 = np.empty(logits.shape[:2], np.float32)
    arguments = logits, seq_lens, k, recent, group_score == GroupScore.LOGITS, tokens, alpha
    over_streams(_top_tokens, threads, logits.shape[0], arguments)
    return tokens, alpha
