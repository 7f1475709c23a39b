"""Token budgets, token selection, and attention over chosen or dequantized tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from csd_spec.arrays import F32
from vcsd_eval.accuracy.published.streams import VALUE_BYTES, StreamOutput, Streams, softmax

MIN_TOKENS = 16  # tokens of the prompt that are attended even if codes alone exceed the budget
SINKS = 4  # first tokens, attended always by methods that keep attention sinks
LOCAL = 64  # last tokens of the prompt, attended always by methods that keep a local window
Mask = NDArray[np.bool_]


def token_bytes(seen: Streams) -> int:
    """Bytes of one token's key and value in one stream in FP16."""
    return 2 * VALUE_BYTES * seen.shape[3]


def recent_bytes(seen: Streams) -> int:
    """Bytes of keys and values of all tokens after the prompt in FP16."""
    N, _, S, _ = seen.shape
    return N * (S - seen.prompt) * token_bytes(seen)


def logits(q: F32, k: F32) -> F32:
    """Scaled dot products q k^T / sqrt(d).

    Args:
        q: Queries, (N, G, d).
        k: Keys or estimates of keys, (N, T, d).

    Returns:
        (N, G, T) float32.
    """
    made: F32 = np.matmul(q * np.float32(q.shape[-1] ** -0.5), k.transpose(0, 2, 1))
    return made


def group_scores(estimated: F32) -> F32:
    """Score of each token for all query heads of a KV head: the sum of their softmax weights.

    Args:
        estimated: Logits, (N, G, T).

    Returns:
        (N, T) float32.
    """
    scores: F32 = softmax(estimated).sum(1)
    return scores


def affordable_tokens(seen: Streams, budget: float, code_bytes: float) -> int:
    """Number of prompt tokens per stream whose FP16 keys and values fit in the budget after codes and recent tokens.

    Args:
        budget: Fraction of `seen.dense_bytes` that the step may read.
        code_bytes: Bytes of codes and metadata that the step reads, all streams.

    Returns:
        At least `MIN_TOKENS`, at most all tokens of the prompt.
    """
    left = budget * seen.dense_bytes - code_bytes - recent_bytes(seen)
    return min(max(int(left // (seen.shape[0] * token_bytes(seen))), MIN_TOKENS), seen.prompt)


def top_mask(scores: F32, count: int) -> Mask:
    """Mark the `count` largest scores of each row.

    Args:
        scores: (N, T).
        count: Number of tokens, at most T.

    Returns:
        (N, T) bool.
    """
    mask = np.zeros(scores.shape, np.bool_)
    best = np.argpartition(-scores, count - 1, axis=1)[:, :count]
    np.put_along_axis(mask, best, True, axis=1)
    return mask


def keep_ends(scores: F32, count: int) -> F32:
    """Raise the scores of attention sinks and of a local window above all others.

    Args:
        scores: Token scores of the prompt, (N, T).
        count: Number of tokens that will be chosen: the local window has `LOCAL` tokens, at most half of `count`.

    Returns:
        (N, T) float32.
    """
    raised = scores.copy()
    raised[:, : min(SINKS, count // 2)] = np.inf
    raised[:, scores.shape[1] - min(LOCAL, count // 2) :] = np.inf
    return raised


def with_recent(seen: Streams, mask: Mask) -> Mask:
    """Extend a mask of prompt tokens, (..., prompt), by all tokens after the prompt: (..., S)."""
    recent = np.ones((*mask.shape[:-1], seen.shape[2] - seen.prompt), np.bool_)
    return np.concatenate([mask, recent], -1)


def attend(seen: Streams, mask: Mask) -> F32:
    """Exact attention over the marked tokens.

    Args:
        mask: (N, S), or (N, G, S) if each query head chooses.

    Returns:
        (N, G, d) float32.
    """
    allowed = mask if mask.ndim == 3 else mask[:, None]
    weights = softmax(np.where(allowed, logits(seen.q, seen.k), np.float32(-np.inf)))
    out: F32 = weights @ seen.v
    return out


def attend_top(seen: Streams, budget: float, scores: F32, code_bytes: float, ends: bool = False) -> StreamOutput:
    """Attend exactly to the prompt tokens with the highest scores that fit in the budget, and to recent tokens.

    Args:
        budget: Fraction of `seen.dense_bytes` that the step may read.
        scores: Token scores of the prompt, (N, prompt).
        code_bytes: Bytes that were read to compute the scores, all streams.
        ends: Whether attention sinks and a local window are always among the chosen tokens.
    """
    count = affordable_tokens(seen, budget, code_bytes)
    mask = with_recent(seen, top_mask(keep_ends(scores, count) if ends else scores, count))
    return StreamOutput(attend(seen, mask), code_bytes + float(mask.sum()) * token_bytes(seen), mask)


def attend_all(seen: Streams, k: F32, v: F32, nbytes: float) -> StreamOutput:
    """Attend to all tokens: dequantized keys and values of the prompt, exact ones after it.

    Args:
        k: Dequantized keys, (N, prompt, d).
        v: Dequantized values, (N, prompt, d).
        nbytes: Bytes of codes and metadata of the prompt; recent tokens are added here.
    """
    prompt = seen.prompt
    weights = softmax(np.concatenate([logits(seen.q, k), logits(seen.q, seen.k[:, prompt:])], -1))
    out = weights[..., :prompt] @ v + weights[..., prompt:] @ seen.v[:, prompt:]
    N, _, S, _ = seen.shape
    return StreamOutput(out, nbytes + recent_bytes(seen), np.ones((N, S), np.bool_))
