"""MagicPIG: keys sampled by locality-sensitive hashing, weighted by their inverse probability.

Source: arXiv 2410.16179, section 4 and Algorithm 1: keys are centered; each of L tables has K random hyperplanes; a key
is sampled if it shares at least 2 tables' buckets with the query. With p = 1 - angle / pi the probability is
u = 1 - (1 - p^K)^L - L p^K (1 - p^K)^(L - 1), and attention is softmax(q k / sqrt(d) - log u) over sampled keys.
Sinks and a local window are always attended and not sampled.

Stored: in each table the bounds of a bucket and 4-byte token numbers; the mean key in FP16. A step reads the buckets of
its queries, not the other entries. Every query head samples separately, and its samples are counted for each head.

Left out: tables of tokens after the prompt. The paper has (K, L) = (10, 150), (9, 120) and (8, 75); here `LADDER` has
more, and a step takes the one that reads most within the budget. Tables with fewer bits use the first bits of the same
hyperplanes.
"""

from __future__ import annotations

import numpy as np

from csd_spec.arrays import F32, U16
from vcsd_eval.accuracy.published.codes import gaussian_matrix, to_half
from vcsd_eval.accuracy.published.streams import VALUE_BYTES, StreamOutput, Streams, softmax
from vcsd_eval.accuracy.published.tokens import (
    LOCAL,
    SINKS,
    Mask,
    affordable_tokens,
    logits,
    recent_bytes,
    token_bytes,
    with_recent,
)

BITS, TABLES = 10, 150
LADDER = (10, 20), (10, 40), (10, 75), (10, 150), (8, 75), (8, 150), (6, 75), (6, 150), (4, 75), (4, 150)
NUMBER_BYTES, BOUNDS_BYTES = 4, 8  # of a token's number, and of where a bucket begins and ends


def hashes(rows: F32) -> U16:
    """`BITS` signs of each of `TABLES` tables, (..., TABLES) uint16, of rows (..., d)."""
    positive = rows @ gaussian_matrix(BITS * TABLES, rows.shape[-1]).T > 0
    bits = positive.reshape(*rows.shape[:-1], TABLES, BITS)
    made: U16 = (bits << np.arange(BITS, dtype=np.uint16)[::-1]).sum(-1, dtype=np.uint16)
    return made


def probability(cosine: F32, bits: int, tables: int) -> F32:
    """Probability that at least 2 of the tables give both vectors the same bits."""
    p = np.power(1 - np.arccos(cosine.clip(-1, 1)).astype(np.float64) / np.pi, bits)
    made: F32 = (1 - (1 - p) ** tables - tables * p * (1 - p) ** (tables - 1)).astype(np.float32)
    return made


def shared(q: U16, k: U16, bits: int, tables: int) -> U16:
    """Number of tables whose buckets query and key share, (N, G, T), of hashes (N, G, L) and (N, T, L)."""
    drop = BITS - bits
    same = (q[:, :, None, :tables] >> drop) == (k[:, None, :, :tables] >> drop)
    made: U16 = same.sum(-1, dtype=np.uint16)
    return made


def _sampled(seen: Streams, setting: tuple[int, int], k: U16, ends: Mask) -> tuple[Mask, float]:
    """Tokens that each query head samples, (N, G, prompt), and the bytes read for that."""
    N, G, _, d = seen.shape
    result = shared(hashes(seen.q), k, *setting)
    mask = (result >= 2) & ~ends
    numbers = NUMBER_BYTES * float(result[:, :, ~ends].sum())
    read = numbers + BOUNDS_BYTES * N * G * setting[1] + float(mask.sum()) * token_bytes(seen)
    return mask, read + N * (VALUE_BYTES * d + float(ends.sum()) * token_bytes(seen)) + recent_bytes(seen)


def magicpig(seen: Streams, budget: float) -> StreamOutput:
    """Attend to sampled tokens by importance, and exactly to the first and the last ones."""
    prompt = seen.prompt
    center = seen.once("magicpig-center", lambda: to_half(seen.k[:, :prompt].mean(1)))
    k = seen.once("magicpig", lambda: hashes(seen.k[:, :prompt] - center[:, None]))
    count = affordable_tokens(seen, budget, 0)
    position = np.arange(prompt)
    ends = (position < min(SINKS, count // 4)) | (position >= prompt - min(LOCAL, count // 2))
    low, high = 0, len(LADDER) - 1
    while low < high:  # the last setting within the budget
        middle = (low + high + 1) // 2
        if _sampled(seen, LADDER[middle], k, ends)[1] <= budget * seen.dense_bytes:
            low = middle
        else:
            high = middle - 1
    mask, nbytes = _sampled(seen, LADDER[low], k, ends)
    centered = seen.k[:, :prompt] - center[:, None]
    lengths = np.sqrt(np.square(seen.q).sum(-1))[..., None] * np.sqrt(np.square(centered).sum(-1))[:, None]
    products = np.matmul(seen.q, centered.transpose(0, 2, 1))
    cosine = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
    inverse = np.where(ends, np.float32(0), -np.log(probability(cosine, *LADDER[low]).clip(1e-30, None)))
    attended = with_recent(seen, mask | ends)
    weighed = logits(seen.q, seen.k)
    weighed[..., :prompt] += inverse
    weights = softmax(np.where(attended, weighed, np.float32(-np.inf)))
    return StreamOutput(weights @ seen.v, nbytes, attended)
