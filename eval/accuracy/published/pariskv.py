"""ParisKV: sign codes of 8 channels vote for candidates, 4-bit codes rank them, the best are attended exactly.

Source: arXiv 2602.07721; the numbers that its abstract leaves open are those of its published configuration. Keys and
queries are divided by their norms, rotated by a randomized Hadamard matrix and split into blocks of 8 channels.
Coarse: a block's signs are one of 256 clusters. For each block the clusters are sorted by the product of their signs
with the query's block; a key gets a vote for each of 6 tiers, which have 5, 15, 30, 50, 75 and 100 % of the collision
ratio's keys, that contains its cluster. The keys with most votes over all blocks are candidates.
Re-rank: sum over blocks of w <q_b, u_b>, where u_b has 1 bit of sign and 3 bits of Lloyd-Max magnitude for each channel
and w = |k| |k_b| / <u_b, k_b / |k_b|> makes the estimate right for the key's own direction.

Stored: a byte a block for coarse selection; for candidates 4 bits a channel and an FP16 weight w a block. Sinks and a
local window are always attended. A KV head's queries are averaged, as published.

Left out: cluster counts are not counted, since they follow from the codes that are read; codes of tokens after the
prompt. The number of candidates is at most the published ratio and at most what half of the budget after sign codes
pays for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from csd_spec.arrays import F32, U8
from vcsd_eval.accuracy.published.codes import packed_bytes, random_hadamard, sphere_codebook, to_half
from vcsd_eval.accuracy.published.streams import VALUE_BYTES, StreamOutput, Streams
from vcsd_eval.accuracy.published.tokens import MIN_TOKENS, affordable_tokens, attend_top, recent_bytes

BLOCK, CODE_BITS = 8, 4
TIERS = 0.05, 0.15, 0.30, 0.50, 0.75, 1.0
RATIOS = (5_000, 0.50, 0.50), (10_000, 0.25, 0.30), (30_000, 0.20, 0.25)  # below tokens: candidates, collisions
LONGEST_RATIOS = 0.10, 0.20
SIGNS = np.where(np.arange(256)[:, None] >> np.arange(BLOCK) & 1, np.float32(1), np.float32(-1))  # (256, 8)


def ratios(tokens: int) -> tuple[float, float]:
    """Fractions of the prompt that are candidates, and whose clusters collide."""
    return next((pair for below, *pair in RATIOS if tokens < below), LONGEST_RATIOS)  # type: ignore[return-value]


def blocks(rows: F32) -> F32:
    """Rows (..., d), rotated, in blocks (..., d / 8, 8)."""
    rotated = rows @ random_hadamard(rows.shape[-1])
    return rotated.reshape(*rows.shape[:-1], -1, BLOCK)


def encode(k: F32) -> tuple[U8, F32]:
    """Clusters (N, T, B) and weighted 4-bit blocks w u_b (N, T, B, 8) of keys (N, T, d)."""
    parts = blocks(k)
    clusters = ((parts > 0) << np.arange(BLOCK)).sum(-1).astype(np.uint8)
    radius = np.sqrt(np.square(parts).sum(-1, keepdims=True))
    unit = np.divide(np.abs(parts), radius, out=np.zeros_like(parts), where=radius > 0)
    book = sphere_codebook(BLOCK, 1 << (CODE_BITS - 1), positive=True)
    magnitude = book[np.searchsorted((book[1:] + book[:-1]) / 2, unit)]
    weight = to_half(radius / (magnitude * unit).sum(-1, keepdims=True).clip(1e-6, None))
    return clusters, weight * magnitude * SIGNS[clusters]


def collisions(q: F32, clusters: U8, ratio: float) -> NDArray[np.int64]:
    """Votes of each key, (N, T).

    Args:
        q: Mean query in blocks, (N, B, 8).
        clusters: (N, T, B).
        ratio: Fraction of keys in all tiers together.
    """
    N, T, B = clusters.shape
    targets = np.ceil(T * ratio * np.array(TIERS))
    rows = np.arange(N * B)[:, None]
    flat = clusters.transpose(0, 2, 1).reshape(N * B, T)
    counts = np.bincount((rows * 256 + flat).ravel(), minlength=N * B * 256).reshape(N * B, 256)
    order = np.argsort(-(q @ SIGNS.T).reshape(N * B, 256), axis=1, kind="stable")
    ordered = np.take_along_axis(counts, order, 1)
    before = ordered.cumsum(1) - ordered
    tiers = np.empty_like(counts)
    np.put_along_axis(tiers, order, (before[..., None] < targets).sum(-1), 1)
    votes: NDArray[np.int64] = np.take_along_axis(tiers, flat.astype(np.int64), 1).reshape(N, B, T).sum(1)
    return votes


def pariskv(seen: Streams, budget: float) -> StreamOutput:
    """Attend to the best of the candidates."""
    N, _, _, d = seen.shape
    prompt = seen.prompt
    clusters, coded = seen.once("pariskv", lambda: encode(seen.k[:, :prompt]))
    candidate_ratio, collision_ratio = ratios(prompt)
    q = blocks(seen.q.mean(1))
    votes = collisions(q, clusters, collision_ratio).astype(np.float32)
    sign_bytes = clusters.size
    rank_bytes = packed_bytes(d, CODE_BITS) + VALUE_BYTES * d // BLOCK  # of a candidate
    left = budget * seen.dense_bytes - sign_bytes - recent_bytes(seen)
    candidates = min(int(np.ceil(candidate_ratio * prompt)), max(int(left / 2 / N / rank_bytes), MIN_TOKENS), prompt)
    if affordable_tokens(seen, budget, sign_bytes) >= candidates:  # all candidates are attended: nothing to rank
        return attend_top(seen, budget, votes, sign_bytes, ends=True)
    best = np.argpartition(-votes, candidates - 1, axis=1)[:, :candidates]
    chosen = np.take_along_axis(coded, best[..., None, None], 1).reshape(N, candidates, d)
    scores = np.full((N, prompt), -np.inf, np.float32)
    np.put_along_axis(scores, best, np.matmul(chosen, q.reshape(N, d, 1))[..., 0], 1)
    return attend_top(seen, budget, scores, sign_bytes + N * candidates * rank_bytes, ends=True)
