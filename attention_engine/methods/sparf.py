"""SparF (InstInfer, Algorithm 1) and its basis SparQ (arXiv 2312.04985)."""

from __future__ import annotations

from attention_engine.select import GroupScore
from attention_engine.step import DecodeStep
from csd_spec.arrays import F32


def sparf(step: DecodeStep, group_score: GroupScore = GroupScore.SOFTMAX) -> F32:
    """Score all tokens with some channels of K, attend to the best, and use the mean of V for the others."""
    weights = step.approximate(step.top_channels(step.r))
    scores = step.weigh(weights, group_score)
    return step.attend(step.best_tokens(scores, step.top_k, step.recent), step.top_k, weights)


def sparq(step: DecodeStep, group_score: GroupScore = GroupScore.SOFTMAX) -> F32:
    """Compute the values of SparF on byte-addressable storage: only selected bytes are transferred."""
    step.byte_addressable = True
    return sparf(step, group_score)


def sparf_apart(step: DecodeStep) -> F32:
    """Run SparF with a selection and fetches of its own for each query head."""
    apart = step.apart()
    out = sparf(apart).reshape(step.q.shape)
    step.chosen, step.alpha = apart.chosen, apart.alpha.reshape(step.alpha.shape)
    return out
