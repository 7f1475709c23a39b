"""What the layout makes worth doing, each an option of its own: whole pages, spending by need, scores in few bits."""

from __future__ import annotations

import numpy as np

from attention_engine.step import Step
from csd_spec.arrays import F32

# Share of the budget that scores in few bits may cost. Half of it errs about as much, but picks more tokens, and most
# of a token's page crosses for nothing.
SCORING = 0.6


def spending(step: Step) -> F32:
    """SparF whose tokens are what the budget has left when the scores are paid.

    A copy of K in few bits scores by more channels (`Step.scoring_channels`), and better scores need fewer tokens.
    """
    weights = step.approximate(step.scoring_channels(SCORING))
    scores = step.weigh(weights)
    counts = step.rows_for(step.budget_bytes - step.useful_bytes)
    return step.attend(step.best_tokens(scores, counts, np.minimum(step.recent, counts)), counts, weights)


def paged(step: Step, top_p: float = 1.0) -> F32:
    """The same by whole pages: what crosses the channel anyway is attended, and the budget counts what crosses.

    A page's value is its tokens' approximate weight. top_p: of the best pages, only the fewest that hold this share of
    a head's weight.
    """
    n = step.view.layout.n
    weights = step.approximate(step.scoring_channels())
    scores = step.weigh(weights)
    pages = np.maximum(1, step.rows_for(step.budget_bytes - step.fetched_bytes) // n)
    tokens, counts = step.best_pages(scores, pages, np.minimum(step.recent, n), top_p)
    return step.attend(tokens, counts, weights)
