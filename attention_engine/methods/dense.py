"""Attention over everything."""

from __future__ import annotations

from attention_engine.step import F32, Step


def dense(step: Step) -> F32:
    """softmax(q K^T / sqrt(d)) V."""
    return step.attend(step.everything(), step.seq_lens)
