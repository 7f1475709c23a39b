"""SnapKV and KeyDiff: methods that evict tokens of the prompt permanently.

Sources: SnapKV (arXiv 2404.14469, section 4: the prompt's last queries vote by their softmax weights, votes are pooled
over neighboring tokens, the window itself stays); KeyDiff (arXiv 2504.15364: keys that are least alike to the mean of
the normalized keys stay).

Stored: nothing but the keys and values that stay, in FP16. The votes are made once, of the prompt.

Left out: the cache has a fixed size, the budget's share of the prompt: each recent token evicts one of the prompt;
SnapKV lets the cache grow. KeyDiff evicts block by block during prefill; here once, after it. A KV head's queries vote
together.
"""

from __future__ import annotations

import numpy as np

from csd_spec.arrays import F32
from vcsd_eval.accuracy.published.streams import StreamOutput, Streams, softmax
from vcsd_eval.accuracy.published.tokens import (
    MIN_TOKENS,
    Mask,
    attend,
    token_bytes,
    top_mask,
    with_recent,
)

KERNEL = 5  # tokens over which SnapKV's votes are averaged
FIRST_RANK = np.float32(1e6)  # more than any sum of votes


def votes(seen: Streams) -> F32:
    """Softmax weight of each prompt token under the prompt's last queries, causal, summed over queries and heads.

    Returns:
        (N, prompt) float32.
    """
    W, prompt = seen.prompt_q.shape[2], seen.prompt
    k = seen.k[:, None, :prompt].transpose(0, 1, 3, 2)
    logits = np.matmul(seen.prompt_q * np.float32(seen.shape[3] ** -0.5), k)
    later = np.arange(prompt) > np.arange(prompt - W, prompt)[:, None]
    total: F32 = softmax(np.where(later, np.float32(-np.inf), logits)).sum((1, 2))
    return total


def pooled(scores: F32) -> F32:
    """Mean over `KERNEL` neighbors of (N, T); there are zeros beyond both ends."""
    padded = np.pad(scores, ((0, 0), (KERNEL // 2, KERNEL // 2)))
    made: F32 = np.lib.stride_tricks.sliding_window_view(padded, KERNEL, axis=1).mean(-1)
    return made


def snapkv_scores(seen: Streams) -> F32:
    """Pooled votes for tokens before the window, (N, prompt); the window's tokens rank first, the last one highest."""
    before = seen.prompt - seen.prompt_q.shape[2]
    window = FIRST_RANK + np.arange(seen.prompt - before, dtype=np.float32)
    window = np.broadcast_to(window, (len(seen.q), seen.prompt - before))
    return np.concatenate([pooled(votes(seen)[:, :before]), window], 1)


def kept_tokens(seen: Streams, budget: float) -> int:
    """Number of prompt tokens per stream that a cache of fixed size holds after recent tokens took their places."""
    if budget >= 1:
        return seen.prompt
    return min(max(int(budget * seen.prompt) - (seen.shape[2] - seen.prompt), MIN_TOKENS), seen.prompt)


def _attend_kept(seen: Streams, kept: Mask) -> StreamOutput:
    mask = with_recent(seen, kept)
    return StreamOutput(attend(seen, mask), float(mask.sum()) * token_bytes(seen), mask)


def snapkv(seen: Streams, budget: float) -> StreamOutput:
    """Attend to the window and to the tokens with the largest pooled votes."""
    scores = seen.once("snapkv", lambda: snapkv_scores(seen))
    return _attend_kept(seen, top_mask(scores, kept_tokens(seen, budget)))


def keydiff_scores(seen: Streams) -> F32:
    """Negative cosine of each prompt key with the mean of the normalized keys, (N, prompt)."""
    k = seen.k[:, : seen.prompt]
    units = k / np.maximum(np.sqrt(np.square(k).sum(-1, keepdims=True)), np.float32(1e-8))
    anchor = units.mean(1)
    anchor /= np.maximum(np.sqrt(np.square(anchor).sum(-1, keepdims=True)), np.float32(1e-8))
    scores: F32 = -np.matmul(units, anchor[..., None])[..., 0]
    return scores


def keydiff(seen: Streams, budget: float) -> StreamOutput:
    """Attend to the tokens with the most distinctive keys."""
    scores = seen.once("keydiff", lambda: keydiff_scores(seen))
    return _attend_kept(seen, top_mask(scores, kept_tokens(seen, budget)))
