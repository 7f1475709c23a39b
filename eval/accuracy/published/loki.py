"""Loki: principal components of the keys find the tokens, which are attended exactly.

Source: arXiv 2406.02542, Algorithm 1: keys and queries in the basis of the keys' principal components; products of the
first d_f d components rank tokens.

Stored: keys are rotated, so that a chosen token costs only its other components and its value; the basis, d^2 numbers
in FP16 for each stream, is counted.

Components are those of centered keys, and keys are not centered when they are rotated, as in Loki's published code.

Left out: calibration on other text (here on the prompt itself). A KV head's queries select together. The paper's
d_f = 1/4 is taken, and fewer components if ranking costs more than half of the budget.
"""

from __future__ import annotations

import numpy as np

from csd_spec.arrays import F32
from vcsd_eval.accuracy.published.codes import to_half
from vcsd_eval.accuracy.published.streams import VALUE_BYTES, StreamOutput, Streams
from vcsd_eval.accuracy.published.tokens import (
    MIN_TOKENS,
    attend,
    group_scores,
    recent_bytes,
    token_bytes,
    top_mask,
    with_recent,
)

COMPONENTS = 1 / 4  # fraction of d that Loki ranks by


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
