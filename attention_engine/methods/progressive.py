"""Progressive precision: K and V in few bits stand for all tokens, both are read in 8 bits where that is worth it."""

from __future__ import annotations

from attention_engine.step import Step
from csd_spec.arrays import F32

LOST = 0.05
LEAST = 1e-5


def progressive(step: Step, lost: float = LOST, least: float = LEAST) -> F32:
    """Attention over all tokens.

    K in few bits scores them. A refined page is read where that spares an error of `least` of a token's |V|^2, as far
    as the budget pays. V of all others is read in few bits, but for those of almost no weight: the lightest groups,
    `lost` of a row's weight at most, have the mean of V. Short contexts, where each page counts, so are read in 8 bits
    as a whole.
    """
    logits = step.score()
    return step.attend_coarse(logits, step.choose_pages(logits, lost, least))
