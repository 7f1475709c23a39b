"""Attention over all tokens."""

from __future__ import annotations

from attention_engine.step import DecodeStep
from csd_spec.arrays import F32


def dense(step: DecodeStep) -> F32:
    """Return softmax(q K^T / sqrt(d)) V."""
    return step.attend(step.everything(), step.seq_lens)
