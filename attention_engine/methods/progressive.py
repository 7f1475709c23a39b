"""Progressive precision: K in few bits scores all tokens, K and V in 8 bits are read where it matters."""

from __future__ import annotations

import numpy as np

from attention_engine.step import Step
from csd_spec.arrays import F32


def progressive(step: Step, top_p: float = 1.0) -> F32:
    """The groups of highest weight are attended in 8 bits, as many as the budget has pages left for.

    The mean of V of the others stands for them. Tokens that no page of scores holds yet are attended in any case.
    top_p: of the best groups, only the fewest that hold this share of a head's weight.
    """
    weights = step.score()
    scores = step.weigh(weights)
    pages = (step.budget_bytes - step.fetched_bytes) // step.view.layout.page_bytes
    tokens, counts = step.best_pages(scores, np.maximum(1, pages), np.maximum(1, step.unscored), top_p)
    return step.attend(tokens, counts, weights, refined=True)
