"""Kernels over pages where they lie: FP16 in, FP32 accumulate, no copy of K or V.

Banks, slots: a slot's bit 31 picks the bank, the rest is the row of that bank. Streams N = sequences x KV heads,
G query heads share a stream, d channels, S tokens. Each loaded row serves all G queries.

Order of arithmetic. Approximate logits add channels in ascending order, one FP32 sum per token. Exact logits are
dot products whose d terms are added in the compiler's vector order. Weighted sums of V add tokens in ascending
order. Nothing that was not selected is ever loaded into an arithmetic unit: that is the NFC filter.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

from attention_engine._half import half_to_float
from csd_spec import KvView
from csd_spec.view import UNMAPPED

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U16 = NDArray[np.uint16]


@njit(inline="always")
def _page(banks, slot):  # type: ignore[no-untyped-def]
    row = slot & np.uint32(0x7FFFFFFF)
    return banks[1][row] if slot >> np.uint32(31) else banks[0][row]


@njit(cache=True, nogil=True)
def _approximate(banks, e_slots, k_slots, seq_lens, q, channels, m, per_group, n, out):  # type: ignore[no-untyped-def]
    streams, queries, d = q.shape
    for stream in range(streams):
        length = seq_lens[stream]
        for query in range(queries):
            out[stream, query, :length] = 0
            total, kept = np.float32(0), np.float32(0)
            for channel in range(d):
                total += abs(q[stream, query, channel])
            for channel in channels[stream]:
                kept += abs(q[stream, query, channel])
            share = kept / total if total > 0 else np.float32(1)
            scale = np.float32(1 / math.sqrt(d * share))
            for group in range((length + per_group - 1) // per_group):
                first = group * per_group
                count = min(per_group, length - first)
                sums = out[stream, query, first : first + count]
                if e_slots[stream, 0, group] == UNMAPPED:
                    for t in range(count):
                        page = _page(banks, k_slots[stream, (first + t) // n])
                        row = page[(first + t) % n * d : ((first + t) % n + 1) * d]
                        for channel in channels[stream]:
                            sums[t] += q[stream, query, channel] * scale * half_to_float(row[channel])
                    continue
                for channel in channels[stream]:
                    page = _page(banks, e_slots[stream, channel // m, group])
                    start = (channel % m) * per_group
                    run = page[start : start + count]
                    weight = q[stream, query, channel] * scale
                    for t in range(count):
                        sums[t] += weight * half_to_float(run[t])


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
def _dot(q, row):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for channel in range(q.size):
        total += q[channel] * half_to_float(row[channel])
    return total


@njit(cache=True, nogil=True)
def _attend(banks, k_slots, v_slots, q, tokens, counts, per_group, alpha, v_mean, out):  # type: ignore[no-untyped-def]
    streams, queries, d = q.shape
    scale = np.float32(1 / math.sqrt(d))
    weights = np.empty((queries, tokens.shape[1]), np.float32)
    for stream in range(streams):
        count = counts[stream]
        for i in range(count):
            group, row = divmod(tokens[stream, i], per_group)
            key = _page(banks, k_slots[stream, group])[row * d : (row + 1) * d]
            for query in range(queries):
                weights[query, i] = scale * _dot(q[stream, query], key)
        totals = np.zeros(queries, np.float32)
        for query in range(queries):
            top = weights[query, :count].max()
            for i in range(count):
                weights[query, i] = math.exp(weights[query, i] - top)
                totals[query] += weights[query, i]
        out[stream] = 0
        for i in range(count):
            group, row = divmod(tokens[stream, i], per_group)
            value = _page(banks, v_slots[stream, group])[row * d : (row + 1) * d]
            for query in range(queries):
                weight, sums = weights[query, i], out[stream, query]
                for channel in range(d):
                    sums[channel] += weight * half_to_float(value[channel])
        for query in range(queries):
            share = alpha[stream, query]
            out[stream, query] *= share / totals[query]
            if share < 1:
                out[stream, query] += (1 - share) * v_mean[stream]


@njit(cache=True, nogil=True)
def _add_rows(sums, rows):  # type: ignore[no-untyped-def]
    for t in range(rows.shape[0]):
        for head in range(rows.shape[1]):
            for channel in range(rows.shape[2]):
                sums[head, channel] += half_to_float(rows[t, head, channel])


def approximate(view: KvView, q: F32, channels: I32) -> F32:
    """Logits from selected channels of embedding-indexed K (Algorithm 1, steps 2 to 4).

    q: (N, G, d) float32; channels: (N, r) ascending. Returns (N, G, max S) float32; beyond a stream's length
    undefined.
    """
    out: F32 = np.empty((*q.shape[:2], int(view.seq_lens.max())), np.float32)
    slots = view.e_slots, view.k_slots, view.seq_lens
    _approximate(view.banks, *slots, q, channels, view.m, view.T, view.n, out)
    return out


def attend(view: KvView, q: F32, tokens: I32, counts: I64, alpha: F32, v_mean: F32) -> F32:
    """Softmax attention over selected tokens, mixed with the mean of V by the weight they miss (steps 8 to 11).

    q: (N, G, d) float32; tokens: (N, k) ascending, of which counts (N,) are used; alpha: (N, G); v_mean: (N, d),
    read where alpha < 1. Returns (N, G, d) float32.
    """
    out: F32 = np.empty(q.shape, np.float32)
    _attend(view.banks, view.k_slots, view.v_slots, q, tokens, counts, view.n, alpha, v_mean, out)
    return out


def add_rows(sums: F32, rows: U16) -> None:
    """Add rows (t, H, d) of FP16 bits to sums (H, d), in token order."""
    _add_rows(sums, rows)
