"""Loki and Double Sparsity: a few numbers of each key find the tokens, which are attended exactly.

Sources: Loki (arXiv 2406.02542, Algorithm 1): keys and queries in the basis of the keys' principal components; products
of the first d_f d components rank tokens. Double Sparsity (arXiv 2408.07092, section 3): r channels that a calibration
finds, those with the largest mean of |q_c k_c|, are stored again in a label cache; their products rank tokens.

Stored: Loki keeps keys rotated, so that a chosen token costs only its other components and its value; the basis, d^2
numbers in FP16 for each stream, is counted. Double Sparsity reads r FP16 numbers of each token in addition to the
chosen tokens.

Components are those of centered keys, and keys are not centered when they are rotated, as in Loki's published code.

Left out: calibration on other text (here on the prompt itself and on its last queries); Double Sparsity's 4-bit label
cache. A KV head's queries select together. The paper's d_f = 1/4 and r = d / 16 are taken; if ranking costs more than
half of the budget, Loki takes fewer components.
"""

from __future__ import annotations

import numpy as np

from csd_spec.arrays import F32, I64
from vcsd_eval.accuracy.published.codes import to_half
from vcsd_eval.accuracy.published.streams import VALUE_BYTES, StreamOutput, Streams
from vcsd_eval.accuracy.published.tokens import (
    MIN_TOKENS,
    attend,
    attend_top,
    group_scores,
    recent_bytes,
    token_bytes,
    top_mask,
    with_recent,
)

COMPONENTS = 1 / 4  # fraction of d that Loki ranks by
LABELS = 1 / 16  # fraction of d in Double Sparsity's label cache


def principal_components(k: F32) -> F32:
    """Orthogonal basis (N, d, d) of keys (N, T, d): columns are eigenvectors of the covariance, largest first."""
    centered = k - k.mean(1, keepdims=True)
    _, vectors = np.linalg.eigh(centered.transpose(0, 2, 1) @ centered)
    basis: F32 = to_half(vectors[..., ::-1])
    return basis


def loki(seen: Streams, budget: float) -> StreamOutput:
    """Attend to the tokens with the largest products of principal components."""
    N, _, _, d = seen.shape
    prompt = seen.prompt

    def encode() -> tuple[F32, F32]:
        basis = principal_components(seen.k[:, :prompt])
        return basis, to_half(seen.k[:, :prompt] @ basis)

    basis, rotated = seen.once("loki", encode)
    left = budget * seen.dense_bytes - recent_bytes(seen) - VALUE_BYTES * basis.size
    used = int(min(COMPONENTS * d, max(left / 2 / (N * prompt * VALUE_BYTES), 1)))
    rank_bytes = VALUE_BYTES * (basis.size + N * prompt * used)
    rest = token_bytes(seen) - VALUE_BYTES * used  # of a chosen token, whose first components were read
    count = int((budget * seen.dense_bytes - recent_bytes(seen) - rank_bytes) // (N * rest))
    count = min(max(count, MIN_TOKENS), prompt)
    q = np.matmul(seen.q * np.float32(d**-0.5), basis)[..., :used]
    mask = top_mask(group_scores(np.matmul(q, rotated[..., :used].transpose(0, 2, 1))), count)
    out = attend(seen, with_recent(seen, mask))
    return StreamOutput(out, rank_bytes + recent_bytes(seen) + float(mask.sum()) * rest, with_recent(seen, mask))


def label_channels(k: F32, prompt_q: F32, count: int) -> I64:
    """Channels (N, count) with the largest mean of |q_c k_c|, of keys (N, T, d) and queries (N, G, W, d)."""
    weight = np.abs(k).mean(1) * np.abs(prompt_q).mean((1, 2))
    return np.argsort(-weight, axis=1, kind="stable")[:, :count]


def double_sparsity(seen: Streams, budget: float) -> StreamOutput:
    """Attend to the tokens with the largest products of label channels."""
    d, prompt = seen.shape[3], seen.prompt

    def encode() -> tuple[I64, F32]:
        channels = label_channels(seen.k[:, :prompt], seen.prompt_q, max(1, int(LABELS * d)))
        return channels, np.take_along_axis(seen.k[:, :prompt], channels[:, None], 2)

    channels, labels = seen.once("double-sparsity", encode)
    q = np.take_along_axis(seen.q * np.float32(d**-0.5), channels[:, None], 2)
    scores = group_scores(np.matmul(q, labels.transpose(0, 2, 1)))
    return attend_top(seen, budget, scores, VALUE_BYTES * (labels.size + channels.size))
