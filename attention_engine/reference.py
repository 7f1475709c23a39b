"""Algorithm 1 in float64, written straight from the paper: what every kernel is measured against."""

from __future__ import annotations

import numpy as np

from csd_spec.arrays import F64, I64


def _softmax(x: F64) -> F64:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    weights: F64 = e / e.sum(axis=-1, keepdims=True)
    return weights


def _argtopk(x: F64, k: int) -> I64:
    """Indices of the k largest, lowest index first among equals, ascending."""
    return np.sort(np.argsort(-x, kind="stable")[:k])


def dense(q: F64, K: F64, V: F64) -> F64:
    """softmax(q K^T / sqrt(d)) V for q (G, d), K and V (S, d)."""
    out: F64 = _softmax(q @ K.T / np.sqrt(q.shape[1])) @ V
    return out


def dense_rows(q: F64, K: F64) -> F64:
    """The largest logit m of each query, and the sum l of e^(logit - m), (G, 2), for q (G, d) and K (S, d)."""
    logits = q @ K.T / np.sqrt(q.shape[1])
    m = logits.max(axis=1)
    return np.stack([m, np.exp(logits - m[:, None]).sum(axis=1)], axis=1)


def token_scores(q: F64, K: F64, r: int) -> F64:
    """Steps 1 to 5 without the mask: the sum over queries of approximate weights, (S,), as a logarithm.

    Far from the top even float64 has no weights left; their logarithms keep their order.
    """
    logits = _approximate_logits(q, K, _top_channels(q, r))
    below = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    scores: F64 = np.logaddexp.reduce(below, axis=0)
    return scores


def _top_channels(q: F64, r: int) -> I64:
    return _argtopk(np.abs(q).sum(axis=0), r)


def _approximate_logits(q: F64, K: F64, i: I64) -> F64:
    """SparQ divides by sqrt(d x the share of |q| in the chosen channels).

    As that share goes to 0, q's chosen channels do so with it and faster than its root: logits go to 0. SparQ's
    published code has 0 / 0 there.
    """
    kept = np.abs(q[:, i]).sum(axis=1)
    share = np.divide(kept, np.abs(q).sum(axis=1), out=np.ones_like(kept), where=kept > 0)
    logits: F64 = q[:, i] @ K[:, i].T / np.sqrt(q.shape[1] * share)[:, None]
    return logits


def sparf(q: F64, K: F64, V: F64, r: int, k: int, l: int) -> tuple[F64, I64, I64]:  # noqa: E741 - the paper's name
    """SparF for one KV head: output (G, d), selected channels (r,) and tokens (k,), both ascending."""
    i, j, alpha = _selected(q, K, r, k, l)
    out = alpha * dense(q, K[j], V[j]) + (1 - alpha) * V.mean(axis=0)
    return out, i, j


def sparf_rows(q: F64, K: F64, r: int, k: int, l: int) -> F64:  # noqa: E741 - the paper's name
    """`dense_rows` of the tokens that SparF selects, (G, 2), but l over alpha: with the weight of the others."""
    _, j, alpha = _selected(q, K, r, k, l)
    m, total = dense_rows(q, K[j]).T
    return np.stack([m, total / alpha[:, 0]], axis=1)


def _selected(q: F64, K: F64, r: int, k: int, l: int) -> tuple[I64, I64, F64]:  # noqa: E741 - the paper's name
    """Channels (r,), tokens (k,), and the share alpha (G, 1) of the approximate weight that these tokens have."""
    S = K.shape[0]
    i = _top_channels(q, r)
    s_hat = _softmax(_approximate_logits(q, K, i))
    mask = np.where(np.arange(S) >= S - l, np.inf, 0.0)
    j = _argtopk(token_scores(q, K, r) + mask, k)
    return i, j, s_hat[:, j].sum(axis=1, keepdims=True)
