"""The best tokens by exact logits without cost: nearly an upper bound for any selection of the same size."""

from __future__ import annotations

from attention_engine.step import DecodeStep
from csd_spec.arrays import F32


def top_k_oracle(step: DecodeStep) -> F32:
    """Attend to the tokens with the largest exact weights."""
    counts = step.rows_for(step.budget_bytes)
    scores = step.weigh(step.peek())
    return step.attend(step.best_tokens(scores, counts, 0 * counts), counts)
