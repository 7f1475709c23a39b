"""RetroInfer's wave index: clusters of keys, the best attended exactly, the next best by their centroids.

Source: arXiv 2505.02922, section 4: spherical k-means in segments of the prompt, a centroid for 16 tokens; a steady
zone of first and last tokens; clusters with the largest products of query and centroid are retrieved. The clusters next
to those are the estimation zone: a cluster with centroid c contributes exp(q c) times its number of tokens to the sum
of weights, and exp(q c) times the sum of its values to the output.

Stored: for each cluster a centroid and the sum of its values in FP16, and where it begins and its size in 6 bytes; keys
and values of a cluster are stored together. A step reads all centroids, sums of the estimation zone, and retrieved
clusters.

Left out: the GPU's block cache; clusters of tokens after the prompt. A KV head's queries select together. Centroids are
means of their keys, since products with unnormalized keys are estimated. Assumed numbers: 23.2 % of the clusters in the
estimation zone, segments of 8,192 tokens, a local window of 64 tokens, at most 1/64 of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from csd_spec.arrays import F32, I64
from vcsd_eval.accuracy.published.codes import SEED, cluster_sums, to_half
from vcsd_eval.accuracy.published.streams import VALUE_BYTES, StreamOutput, Streams
from vcsd_eval.accuracy.published.tokens import LOCAL, SINKS, affordable_tokens, group_scores, logits, token_bytes

CLUSTER, SEGMENT = 16, 8192  # tokens
ESTIMATED = 0.232
ITERATIONS = 10
INDEX_BYTES = 6  # of a cluster: where it begins, and its size


@dataclass(frozen=True, slots=True)
class WaveIndex:
    """Clusters of a prompt.

    Attributes:
        assigned: Cluster of each token, (N, T).
        sizes: Tokens of each cluster, (N, C).
        centroids: Mean keys, (N, C, d), and `sums`: summed values, (N, C, d).
    """

    assigned: I64
    sizes: I64
    centroids: F32
    sums: F32


def spherical_kmeans(points: F32, count: int) -> I64:
    """Cluster (T,) of each point (T, d), by cosine after subtracting the mean, from points drawn at random."""
    centered = points - points.mean(0)
    lengths = np.sqrt(np.square(centered).sum(1, keepdims=True))
    units = np.divide(centered, lengths, out=np.zeros_like(centered), where=lengths > 0)
    centers = units[np.random.default_rng(SEED).choice(len(units), count, replace=False)]
    for _ in range(ITERATIONS):
        sums, _ = cluster_sums(units, (units @ centers.T).argmax(1), count)
        norms = np.sqrt(np.square(sums).sum(1, keepdims=True))
        centers = np.where(norms > 0, sums / np.maximum(norms, np.float32(1e-20)), centers)
    made: I64 = (units @ centers.T).argmax(1)
    return made


def encode(k: F32, v: F32) -> WaveIndex:
    """Index of keys and values (N, T, d)."""
    N, T, d = k.shape
    starts = range(0, T, SEGMENT)
    counts = [-(-min(SEGMENT, T - start) // CLUSTER) for start in starts]
    first = np.concatenate([[0], np.cumsum(counts)])
    assigned = np.zeros((N, T), np.int64)
    C = int(first[-1])
    sizes, centroids, sums = (
        np.zeros((N, C), np.int64),
        np.zeros((N, C, d), np.float32),
        np.zeros((N, C, d), np.float32),
    )
    for n in range(N):
        for segment, start in enumerate(starts):
            part = slice(start, start + SEGMENT)
            assigned[n, part] = first[segment] + spherical_kmeans(k[n, part], counts[segment])
        centroids[n], sizes[n] = cluster_sums(k[n], assigned[n], C)
        sums[n], _ = cluster_sums(v[n], assigned[n], C)
    centroids /= np.maximum(sizes, 1).astype(np.float32)[..., None]
    return WaveIndex(assigned, sizes, to_half(centroids), to_half(sums))


def retroinfer(seen: Streams, budget: float) -> StreamOutput:
    """Attend to the steady zone and retrieved clusters exactly, and to the estimation zone by centroids."""
    N, _, S, d = seen.shape
    prompt = seen.prompt
    local = min(LOCAL, prompt // 64)
    inner = slice(SINKS, prompt - local)
    index = seen.once("retroinfer", lambda: encode(seen.k[:, inner], seen.v[:, inner]))
    C = index.sizes.shape[1]
    estimated = int(np.ceil(ESTIMATED * C))
    read = VALUE_BYTES * d * (C + estimated) + INDEX_BYTES * C
    room = affordable_tokens(seen, budget, N * read) - SINKS - local
    by_centroid = logits(seen.q, index.centroids)
    with_size = by_centroid + np.log(np.maximum(index.sizes, 1)).astype(np.float32)[:, None]
    with_size = np.where(index.sizes[:, None] > 0, with_size, np.float32(-np.inf))
    order = np.argsort(-group_scores(with_size), axis=1, kind="stable")
    before = np.take_along_axis(index.sizes, order, 1).cumsum(1)
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.broadcast_to(np.arange(C), (N, C)), 1)
    retrieved = (before <= room).sum(1)[:, None]  # whole clusters, the best first
    zone = (rank >= retrieved) & (rank < retrieved + estimated)
    mask = np.ones((N, S), np.bool_)
    mask[:, inner] = np.take_along_axis(rank < retrieved, index.assigned, 1)
    exact = np.where(mask[:, None], logits(seen.q, seen.k), np.float32(-np.inf))
    centers = np.where(zone[:, None], by_centroid, np.float32(-np.inf))
    top = exact.max(-1, keepdims=True)
    of_tokens, of_clusters = np.exp(exact - top), np.exp(np.minimum(centers - top, np.float32(60)))
    total = of_tokens.sum(-1) + (of_clusters * index.sizes[:, None]).sum(-1)
    out = ((of_tokens @ seen.v + of_clusters @ index.sums) / total[..., None]).astype(np.float32)
    return StreamOutput(out, N * read + float(mask.sum()) * token_bytes(seen), mask)
