"""PQCache: product quantization of keys finds the tokens, which are attended exactly.

Source: arXiv 2407.12820, section 3: keys are split into m = 2 parts of d / m channels; k-means finds 2^b = 64 centroids
for each part; products of query parts with centroids are looked up and added. Initial and local tokens are always
attended.

Stored: m codes of b bits a token; m 2^b centroids of d / m channels in FP16 for each stream, counted.

Left out: the GPU cache of fetched tokens; the adaptive number of k-means iterations (here `ITERATIONS`). Tokens after
the prompt get no code.
"""

from __future__ import annotations

import numpy as np

from csd_spec.arrays import F32, I64
from vcsd_eval.accuracy.published.codes import SEED, cluster_sums, packed_bytes, to_half
from vcsd_eval.accuracy.published.streams import VALUE_BYTES, StreamOutput, Streams
from vcsd_eval.accuracy.published.tokens import attend_top, group_scores

PARTS, BITS = 2, 6
ITERATIONS = 15


def assign(points: F32, centroids: F32) -> I64:
    """Index of the nearest centroid (C, w) of each point (T, w), by squared distance."""
    distances = np.square(centroids).sum(1) - 2 * points @ centroids.T
    made: I64 = distances.argmin(1)
    return made


def kmeans(points: F32, count: int) -> F32:
    """Centroids (count, w) of points (T, w) by Lloyd's iteration from points drawn at random.

    A centroid that no point is assigned to stays where it is.
    """
    draw = np.random.default_rng(SEED)
    centroids = points[draw.choice(len(points), count, replace=len(points) < count)]
    for _ in range(ITERATIONS):
        sums, sizes = cluster_sums(points, assign(points, centroids), count)
        centroids = np.where(sizes[:, None] > 0, sums / np.maximum(sizes, 1).astype(np.float32)[:, None], centroids)
    return to_half(centroids)


def encode(k: F32) -> tuple[F32, I64]:
    """Centroids (N, m, 2^b, d / m) and codes (N, m, T) of keys (N, T, d)."""
    N, T, d = k.shape
    parts = np.ascontiguousarray(k.reshape(N, T, PARTS, d // PARTS).transpose(0, 2, 1, 3))
    centroids = np.stack([[kmeans(part, 1 << BITS) for part in stream] for stream in parts])
    codes = np.stack([[assign(parts[n, m], centroids[n, m]) for m in range(PARTS)] for n in range(N)])
    return centroids, codes


def estimate(q: F32, centroids: F32, codes: I64) -> F32:
    """Estimates of q k, (N, G, T), of queries (N, G, d): looked-up products of parts, added."""
    N, G, d = q.shape
    tables = q.reshape(N, G, PARTS, d // PARTS).transpose(0, 2, 1, 3) @ centroids.transpose(0, 1, 3, 2)
    each = [np.take_along_axis(tables[:, m], codes[:, m][:, None].repeat(G, 1), -1) for m in range(PARTS)]
    made: F32 = np.sum(each, 0)
    return made


def code_bytes(seen: Streams) -> int:
    """Bytes of codes of the prompt and of centroids, all streams."""
    N, _, _, d = seen.shape
    return N * (packed_bytes(seen.prompt * PARTS, BITS) + VALUE_BYTES * d * (1 << BITS))


def pqcache(seen: Streams, budget: float) -> StreamOutput:
    """Attend to the tokens with the largest weights by product quantization."""
    centroids, codes = seen.once("pqcache", lambda: encode(seen.k[:, : seen.prompt]))
    estimated = estimate(seen.q, centroids, codes) / np.float32(np.sqrt(seen.shape[3]))
    return attend_top(seen, budget, group_scores(estimated), code_bytes(seen), ends=True)
