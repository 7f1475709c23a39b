"""Attention over all tokens."""

from __future__ import annotations

from attention_engine.step import Step
from csd_spec.arrays import F32


def dense(step: Step) -> F32:
    """Return softmax(q K^T / sqrt(d)) V."""
    return step.attend(step.everything(), step.seq_lens)
