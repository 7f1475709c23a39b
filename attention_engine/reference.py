"""Float64 implementation of Algorithm 1 from the paper: the reference for all kernels.

terms (G, 4), if given, are the logit terms of the model: scale, cap, sink and slope of each query, as in
`csd_spec.Attend`. tokens are row numbers of K, by default all; length is the length of the sequence.
"""

from __future__ import annotations

import numpy as np

from csd_spec.arrays import F64, I64


def _softmax(x: F64) -> F64:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    weights: F64 = e / e.sum(axis=-1, keepdims=True)
    return weights


def _argtopk(x: F64, k: int) -> I64:
    """Return the indices of the k largest values, ascending; of equal values, the lowest index wins."""
    return np.sort(np.argsort(-x, kind="stable")[:k])


def apply_logit_terms_reference(logits: F64, terms: F64 | None, tokens: I64, length: int) -> F64:
    """Apply cap and slope to logits (G, k) of tokens (k,), already multiplied by the scale."""
    if terms is None:
        return logits
    cap, slope = terms[:, 1:2], terms[:, 3:4]
    finite = np.where(np.isinf(cap), 1, cap)
    capped = np.where(np.isinf(cap), logits, finite * np.tanh(logits / finite))
    return capped + slope * (tokens - (length - 1))


def _scale(terms: F64 | None, d: int) -> F64 | float:
    return 1 / np.sqrt(d) if terms is None else terms[:, :1]


def _share_without_sink(m: F64, total: F64, terms: F64 | None) -> F64:
    """Return the share of the softmax weight without the sink, for the largest logit m and the total, each (G,)."""
    if terms is None:
        return np.ones_like(m)
    share: F64 = 1 / (1 + np.exp(terms[:, 2] - m - np.log(total)))
    return share


def dense(q: F64, K: F64, V: F64, terms: F64 | None = None) -> F64:
    """Return softmax(q K^T / sqrt(d)) V for q (G, d), K and V (S, d)."""
    logits = apply_logit_terms_reference(_scale(terms, q.shape[1]) * (q @ K.T), terms, np.arange(len(K)), len(K))
    m, total = _rows(logits).T
    out: F64 = _softmax(logits) @ V * _share_without_sink(m, total, terms)[:, None]
    return out


def _rows(logits: F64) -> F64:
    m = logits.max(axis=1)
    return np.stack([m, np.exp(logits - m[:, None]).sum(axis=1)], axis=1)


def dense_rows(q: F64, K: F64) -> F64:
    """Return the largest logit m and the sum l of e^(logit - m) of each query, (G, 2), for q (G, d) and K (S, d)."""
    return _rows(q @ K.T / np.sqrt(q.shape[1]))


def token_scores(q: F64, K: F64, r: int, terms: F64 | None = None) -> F64:
    """Return the logarithm of the sum of approximate weights over queries, (S,): steps 1 to 5 without the mask.

    Small weights underflow even in float64; their logarithms preserve the order.
    """
    logits = _approximate_logits(q, K, _top_channels(q, r), terms)
    below = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    m, total = _rows(logits).T
    below += np.log(_share_without_sink(m, total, terms))[:, None]
    scores: F64 = np.logaddexp.reduce(below, axis=0)
    return scores


def _top_channels(q: F64, r: int) -> I64:
    return _argtopk(np.abs(q).sum(axis=0), r)


def _approximate_logits(q: F64, K: F64, i: I64, terms: F64 | None = None) -> F64:
    """Return the approximate logits. As in SparQ, the divisor is sqrt(d x the share of |q| in the chosen channels).

    If the share approaches 0, q in the chosen channels approaches 0 faster than its square root, so the logits approach
    0. The published code of SparQ computes 0 / 0 in this case.
    """
    chosen = np.abs(q[:, i]).sum(axis=1)
    share = np.divide(chosen, np.abs(q).sum(axis=1), out=np.ones_like(chosen), where=chosen > 0)
    logits: F64 = _scale(terms, q.shape[1]) * (q[:, i] @ K[:, i].T) / np.sqrt(share)[:, None]
    return apply_logit_terms_reference(logits, terms, np.arange(len(K)), len(K))


def sparf(q: F64, K: F64, V: F64, r: int, k: int, l: int, terms: F64 | None = None) -> tuple[F64, I64, I64]:  # noqa: E741 - the paper's name
    """Return SparF for one KV head: output (G, d), selected channels (r,) and tokens (k,), both ascending."""
    i, j, alpha = _selected(q, K, r, k, l, terms)
    logits = apply_logit_terms_reference(_scale(terms, q.shape[1]) * (q @ K[j].T), terms, j, len(K))
    m, total = _rows(logits).T
    out = alpha * (_softmax(logits) @ V[j]) + (1 - alpha) * V.mean(axis=0)
    return out * _share_without_sink(m, total / alpha[:, 0], terms)[:, None], i, j


def sparf_rows(q: F64, K: F64, r: int, k: int, l: int) -> F64:  # noqa: E741 - the paper's name
    """Return `dense_rows` of the tokens that SparF selects, (G, 2), with l divided by alpha for the other tokens."""
    _, j, alpha = _selected(q, K, r, k, l)
    m, total = dense_rows(q, K[j]).T
    return np.stack([m, total / alpha[:, 0]], axis=1)


def _selected(q: F64, K: F64, r: int, k: int, l: int, terms: F64 | None = None) -> tuple[I64, I64, F64]:  # noqa: E741 - the paper's name
    """Return channels (r,), tokens (k,), and alpha (G, 1), the share of the approximate weight of these tokens."""
    S = K.shape[0]
    i = _top_channels(q, r)
    s_hat = _softmax(_approximate_logits(q, K, i, terms))
    mask = np.where(np.arange(S) >= S - l, np.inf, 0.0)
    j = _argtopk(token_scores(q, K, r, terms) + mask, k)
    return i, j, s_hat[:, j].sum(axis=1, keepdims=True)
