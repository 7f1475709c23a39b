"""Random decode steps whose softmax weights are uneven, as in a model, and dense attention in float64."""

import numpy as np

from vcsd_eval.accuracy.published import Streams


def draw(n=2, g=3, s=512, d=64, recent=4, window=16, seed=1):
    """Streams (n, g, s, d): channels of keys have offsets and unequal scales, and queries resemble some keys."""
    random = np.random.default_rng(seed)
    scale = np.exp(random.normal(0, 0.5, (n, 1, d)))
    k = random.standard_normal((n, s, d)) * scale + random.normal(0, 1, (n, 1, d)) * (random.random((n, 1, d)) < 0.2)
    v = random.standard_normal((n, s, d)) + random.normal(0, 0.5, (n, 1, d))

    def queries(count):
        like = k[np.arange(n)[:, None, None], random.integers(0, s, (n, g, count))]
        return 0.7 * random.standard_normal((n, g, count, d)) + 0.6 * like / scale[:, None] ** 2

    halved = [part.astype(np.float16).astype(np.float32) for part in (queries(1)[:, :, 0], k, v, queries(window))]
    return Streams(*halved[:3], s - recent, halved[3])


def dense(seen):
    """softmax(q k^T / sqrt(d)) v in float64, (N, G, d), and its weights (N, G, S)."""
    q, k, v = (part.astype(np.float64) for part in (seen.q, seen.k, seen.v))
    logits = np.einsum("ngd,nsd->ngs", q, k) / np.sqrt(q.shape[-1])
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("ngs,nsd->ngd", weights, v), weights


def error(out, expected):
    """Mean over query heads of |out - expected| / |expected|."""
    return float(np.mean(np.linalg.norm(out - expected, axis=-1) / np.linalg.norm(expected, axis=-1)))
