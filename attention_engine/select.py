"""argtopk: which channels of q, and which tokens. Ties go to the lowest index, everywhere."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numba import njit
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


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
def _top(scores, k, out):  # type: ignore[no-untyped-def]
    """Indices of the k largest of scores (N,), ascending, into out[:k]: radix selection of the k-th, then one pass."""
    if k == scores.size:
        for i in range(k):
            out[i] = i
        return
    prefix, known, left = np.uint32(0), np.uint32(0), k
    for shift in (21, 10, 0):
        width = 11 if shift else 10
        counts = np.zeros(1 << width, np.int64)
        for value in scores:
            key = _ordered(value)
            if key & known == prefix:
                counts[(key >> shift) & ((1 << width) - 1)] += 1
        digit = counts.size - 1
        while counts[digit] < left:
            left -= counts[digit]
            digit -= 1
        prefix |= np.uint32(digit) << np.uint32(shift)
        known |= np.uint32((1 << width) - 1) << np.uint32(shift)
    found = 0
    for i in range(scores.size):
        key = _ordered(scores[i])
        if key > prefix or (key == prefix and left > 0):
            left -= key == prefix
            out[found] = i
            found += 1


@njit(cache=True, nogil=True)
def _top_channels(q, r, out):  # type: ignore[no-untyped-def]
    for stream in range(q.shape[0]):
        size = np.zeros(q.shape[2], np.float32)
        for query in range(q.shape[1]):
            size += np.abs(q[stream, query])
        _top(size, r, out[stream])


@njit(cache=True, nogil=True)
def _top_tokens(weights, seq_lens, k, recent, by_logits, out, alpha):  # type: ignore[no-untyped-def]
    """`weights` holds logits on entry and softmax weights on exit."""
    queries = weights.shape[1]
    for stream in range(weights.shape[0]):
        length = seq_lens[stream]
        score = np.zeros(length, np.float32)
        for query in range(queries):
            row = weights[stream, query, :length]
            if by_logits:
                score += row
            row -= row.max()
            total = np.float32(0)
            for t in range(length):
                row[t] = np.exp(row[t])
                total += row[t]
            row /= total
            if not by_logits:
                score += row
        old = length - recent[stream]
        chosen = k[stream] - recent[stream]
        _top(score[:old], chosen, out[stream])
        for i in range(recent[stream]):
            out[stream, chosen + i] = old + i
        for query in range(queries):
            kept = np.float32(0)
            for i in range(k[stream]):
                kept += weights[stream, query, out[stream, i]]
            alpha[stream, query] = min(kept, np.float32(1))


def top_channels(q: F32, r: int) -> I32:
    """The r channels with the largest |q| summed over the query group, ascending (Algorithm 1, step 1).

    q: (N, G, d) float32. Returns (N, r) int32.
    """
    out: I32 = np.empty((q.shape[0], r), np.int32)
    _top_channels(q, r, out)
    return out


def top_tokens(
    logits: F32, seq_lens: I64, k: I64, recent: I64, group_score: GroupScore = GroupScore.SOFTMAX
) -> tuple[I32, F32]:
    """The `recent` last tokens and the best others, k in all, ascending, and their weight (steps 4 to 7).

    logits: (N, G, S) float32, overwritten by their softmax; seq_lens, k, recent: (N,), recent <= k <= seq_lens.
    Returns tokens (N, max k) int32, of which k are used, and alpha (N, G) float32.
    """
    tokens: I32 = np.zeros((logits.shape[0], int(k.max())), np.int32)
    alpha: F32 = np.empty(logits.shape[:2], np.float32)
    _top_tokens(logits, seq_lens, k, recent, group_score == GroupScore.LOGITS, tokens, alpha)
    return tokens, alpha
