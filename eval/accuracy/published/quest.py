"""Quest: pages of tokens by an upper bound of their logits.

Source: arXiv 2406.10774, section 3: for each page of 16 tokens the least and the largest value of each channel; the
bound of q k is the sum over channels of max(q_i low_i, q_i high_i); the pages with the largest bounds are attended.

Stored: two FP16 vectors of d channels for each page.

Left out: full attention of the first two layers. A KV head's queries select together, by the sum of the softmax weights
of their bounds. The prompt's last page may be shorter.
"""

from __future__ import annotations

import numpy as np

from csd_spec.arrays import F32
from vcsd_eval.accuracy.published.streams import VALUE_BYTES, StreamOutput, Streams
from vcsd_eval.accuracy.published.tokens import (
    affordable_tokens,
    attend,
    group_scores,
    token_bytes,
    top_mask,
    with_recent,
)

PAGE = 16  # tokens


def extremes(k: F32) -> tuple[F32, F32]:
    """Least and largest keys of each page, (N, pages, d) each, of keys (N, T, d)."""
    starts = np.arange(0, k.shape[1], PAGE)
    return np.minimum.reduceat(k, starts, axis=1), np.maximum.reduceat(k, starts, axis=1)


def bounds(q: F32, low: F32, high: F32) -> F32:
    """Upper bounds of q k, (N, G, pages): positive channels of q meet the largest values, negative ones the least."""
    zero = np.float32(0)
    made: F32 = np.matmul(np.maximum(q, zero), high.transpose(0, 2, 1))
    made += np.matmul(np.minimum(q, zero), low.transpose(0, 2, 1))
    return made


def quest(seen: Streams, budget: float) -> StreamOutput:
    """Attend to whole pages."""
    low, high = seen.once("quest", lambda: extremes(seen.k[:, : seen.prompt]))
    pages = low.shape[1]
    code_bytes = 2 * VALUE_BYTES * low.size
    count = affordable_tokens(seen, budget, code_bytes)
    scores = group_scores(bounds(seen.q * np.float32(seen.shape[3] ** -0.5), low, high))
    chosen = top_mask(scores, pages if count == seen.prompt else max(1, count // PAGE))
    mask = with_recent(seen, chosen.repeat(PAGE, 1)[:, : seen.prompt])
    return StreamOutput(attend(seen, mask), code_bytes + float(mask.sum()) * token_bytes(seen), mask)
