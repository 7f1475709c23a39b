"""RaBitQ on keys: sign codes after a random rotation, an unbiased estimate of q k, exact attention to the best tokens.

Source: RaBitQ (arXiv 2405.12497), section 3: with the unit vector o, its rotated image Po and the code
x = sign(Po) / sqrt(d), <x, Pq> / <x, Po> estimates <o, q> without bias. Centering of keys and queries as in RaBitQCache
(arXiv 2606.31519): q k = (q - a)(k - c) + q c + a k - a c with the mean query a and the mean key c.

Stored: 1 bit for each channel of a key; for each token |k - c| / <x, Po> and a k in FP16; a and c in FP16.

Left out of RaBitQCache: 4-bit queries (queries are not read from the cache), top-p instead of a fixed number of tokens,
tokens that are always attended. The mean query is that of the prompt's last queries, which are the ones recorded.
"""

from __future__ import annotations

import numpy as np

from csd_spec.arrays import F32
from vcsd_eval.accuracy.published.codes import packed_bytes, random_orthogonal, to_half
from vcsd_eval.accuracy.published.streams import VALUE_BYTES, StreamOutput, Streams
from vcsd_eval.accuracy.published.tokens import attend_top, group_scores

Codes = tuple[F32, F32, F32, F32, F32]


def encode(k: F32, prompt_q: F32) -> Codes:
    """Codes of keys.

    Args:
        k: Keys, (N, T, d).
        prompt_q: Queries whose mean is subtracted, (N, G, W, d).

    Returns:
        Signs (N, T, d), scales (N, T), products of the mean query with keys (N, T), the mean query (N, d) and the mean
        key (N, d).
    """
    d = k.shape[-1]
    center, mean_q = to_half(k.mean(1)), to_half(prompt_q.mean((1, 2)))
    rotated = (k - center[:, None]) @ random_orthogonal(d)
    signs = np.where(rotated > 0, np.float32(1), np.float32(-1))
    norm1, squares = np.abs(rotated).sum(-1), np.square(rotated).sum(-1)
    # |k - c| / (<x, Po> sqrt(d)), since <x, Po> = |P(k - c)|_1 / (|k - c| sqrt(d))
    scales = to_half(np.divide(squares, norm1, out=np.zeros_like(norm1), where=norm1 > 0))
    return signs, scales, to_half((k @ mean_q[..., None])[..., 0]), mean_q, center


def estimate(q: F32, codes: Codes) -> F32:
    """Estimates of q k, (N, G, T), of queries (N, G, d)."""
    signs, scales, mean_q_k, mean_q, center = codes
    rotated = (q - mean_q[:, None]) @ random_orthogonal(q.shape[-1])
    made: F32 = np.matmul(rotated, signs.transpose(0, 2, 1)) * scales[:, None]
    made += np.matmul(q - mean_q[:, None], center[..., None]) + mean_q_k[:, None]
    return made


def code_bytes(seen: Streams) -> int:
    """Bytes of codes of the prompt with two FP16 numbers a token and both means, all streams."""
    N, _, _, d = seen.shape
    return N * (packed_bytes(seen.prompt * d, 1) + 2 * VALUE_BYTES * (seen.prompt + d))


def rabitq(seen: Streams, budget: float) -> StreamOutput:
    """Attend to the tokens with the largest estimated weights."""
    codes = seen.once("rabitq", lambda: encode(seen.k[:, : seen.prompt], seen.prompt_q))
    estimated = estimate(seen.q, codes) / np.float32(np.sqrt(seen.shape[3]))
    return attend_top(seen, budget, group_scores(estimated), code_bytes(seen))
