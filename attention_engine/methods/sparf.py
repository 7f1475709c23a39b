"""SparF (InstInfer, Algorithm 1), and what it takes from SparQ (arXiv 2312.04985)."""

from __future__ import annotations

from attention_engine.select import GroupScore
from attention_engine.step import Step
from csd_spec.arrays import F32


def sparf(step: Step, group_score: GroupScore = GroupScore.SOFTMAX) -> F32:
    """Some channels of K score all tokens, the best are attended, the mean of V stands for the others."""
    weights = step.approximate(step.top_channels(step.r))
    scores = step.weigh(weights, group_score)
    return step.attend(step.best_tokens(scores, step.top_k, step.recent), step.top_k, weights)


def sparq(step: Step, group_score: GroupScore = GroupScore.SOFTMAX) -> F32:
    """SparF's numbers on byte-addressable storage: only what was selected moves."""
    step.byte_addressable = True
    return sparf(step, group_score)


def sparf_apart(step: Step) -> F32:
    """SparF where every query head selects and fetches for itself."""
    apart = step.apart()
    out = sparf(apart).reshape(step.q.shape)
    step.chosen, step.alpha = apart.chosen, apart.alpha.reshape(step.alpha.shape)
    return out
