"""Algorithm 1 in float64, written straight from the paper: what every kernel is measured against.

terms (G, 4), where they are given, are what a model does with logits besides: scale, cap, sink and slope of each query,
as `csd_spec.Attend` has them. tokens are numbers of rows of K, all where none are given; length is of the sequence.
"""

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


def bent(logits: F64, terms: F64 | None, tokens: I64, length: int) -> F64:
    """Logits (G, k) of tokens (k,) under the scale 1, which become those that the model takes the softmax of."""
    if terms is None:
        return logits
    cap, slope = terms[:, 1:2], terms[:, 3:4]
    finite = np.where(np.isinf(cap), 1, cap)
    capped = np.where(np.isinf(cap), logits, finite * np.tanh(logits / finite))
    return capped + slope * (tokens - (length - 1))


def _scale(terms: F64 | None, d: int) -> F64 | float:
    return 1 / np.sqrt(d) if terms is None else terms[:, :1]


def _not_sunk(m: F64, total: F64, terms: F64 | None) -> F64:
    """Of a softmax with largest logit m and sum total of e^(logit - m), each (G,), the share that is not the sink's."""
    if terms is None:
        return np.ones_like(m)
    share: F64 = 1 / (1 + np.exp(terms[:, 2] - m - np.log(total)))
    return share


def dense(q: F64, K: F64, V: F64, terms: F64 | None = None) -> F64:
    """softmax(q K^T / sqrt(d)) V for q (G, d), K and V (S, d)."""
    logits = bent(_scale(terms, q.shape[1]) * (q @ K.T), terms, np.arange(len(K)), len(K))
    m, total = _rows(logits).T
    out: F64 = _softmax(logits) @ V * _not_sunk(m, total, terms)[:, None]
    return out


def _rows(logits: F64) -> F64:
    m = logits.max(axis=1)
    return np.stack([m, np.exp(logits - m[:, None]).sum(axis=1)], axis=1)


def dense_rows(q: F64, K: F64) -> F64:
    """The largest logit m of each query, and the sum l of e^(logit - m), (G, 2), for q (G, d) and K (S, d)."""
    return _rows(q @ K.T / np.sqrt(q.shape[1]))


def token_scores(q: F64, K: F64, r: int, terms: F64 | None = None) -> F64:
    """Steps 1 to 5 without the mask: the sum over queries of approximate weights, (S,), as a logarithm.

    Far from the top even float64 has no weights left; their logarithms keep their order.
    """
    logits = _approximate_logits(q, K, _top_channels(q, r), terms)
    below = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    m, total = _rows(logits).T
    below += np.log(_not_sunk(m, total, terms))[:, None]
    scores: F64 = np.logaddexp.reduce(below, axis=0)
    return scores


def _top_channels(q: F64, r: int) -> I64:
    return _argtopk(np.abs(q).sum(axis=0), r)


def _approximate_logits(q: F64, K: F64, i: I64, terms: F64 | None = None) -> F64:
    """SparQ divides by sqrt(d x the share of |q| in the chosen channels).

    As that share goes to 0, q's chosen channels do so with it and faster than its root: logits go to 0. SparQ's
    published code has 0 / 0 there.
    """
    kept = np.abs(q[:, i]).sum(axis=1)
    share = np.divide(kept, np.abs(q).sum(axis=1), out=np.ones_like(kept), where=kept > 0)
    logits: F64 = _scale(terms, q.shape[1]) * (q[:, i] @ K[:, i].T) / np.sqrt(share)[:, None]
    return bent(logits, terms, np.arange(len(K)), len(K))


def sparf(q: F64, K: F64, V: F64, r: int, k: int, l: int, terms: F64 | None = None) -> tuple[F64, I64, I64]:  # noqa: E741 - the paper's name
    """SparF for one KV head: output (G, d), selected channels (r,) and tokens (k,), both ascending."""
    i, j, alpha = _selected(q, K, r, k, l, terms)
    logits = bent(_scale(terms, q.shape[1]) * (q @ K[j].T), terms, j, len(K))
    m, total = _rows(logits).T
    out = alpha * (_softmax(logits) @ V[j]) + (1 - alpha) * V.mean(axis=0)
    return out * _not_sunk(m, total / alpha[:, 0], terms)[:, None], i, j


def sparf_rows(q: F64, K: F64, r: int, k: int, l: int) -> F64:  # noqa: E741 - the paper's name
    """`dense_rows` of the tokens that SparF selects, (G, 2), but l over alpha: with the weight of the others."""
    _, j, alpha = _selected(q, K, r, k, l)
    m, total = dense_rows(q, K[j]).T
    return np.stack([m, total / alpha[:, 0]], axis=1)


def _selected(q: F64, K: F64, r: int, k: int, l: int, terms: F64 | None = None) -> tuple[I64, I64, F64]:  # noqa: E741 - the paper's name
    """Channels (r,), tokens (k,), and the share alpha (G, 1) of the approximate weight that these tokens have."""
    S = K.shape[0]
    i = _top_channels(q, r)
    s_hat = _softmax(_approximate_logits(q, K, i, terms))
    mask = np.where(np.arange(S) >= S - l, np.inf, 0.0)
    j = _argtopk(token_scores(q, K, r, terms) + mask, k)
    return i, j, s_hat[:, j].sum(axis=1, keepdims=True)
