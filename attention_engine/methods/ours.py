"""Options that the layout makes worthwhile: whole pages, a token count from the remaining budget, low-bit scores."""

from __future__ import annotations

import numpy as np

from attention_engine.step import DecodeStep
from csd_spec.arrays import F32

# Share of the budget for low-bit scores. Half of it has about the same error but selects more tokens, and most of the
# transferred bytes of their pages are wasted.
SCORING = 0.6


def spending(step: DecodeStep) -> F32:
    """Run SparF with a token count that spends the budget left after the scores.

    A low-bit copy of K scores with more channels (`DecodeStep.scoring_channels`), and better scores need fewer tokens.
    """
    weights = step.approximate(step.scoring_channels(SCORING))
    scores = step.weigh(weights)
    counts = step.rows_for(step.budget_bytes - step.useful_bytes)
    return step.attend(step.best_tokens(scores, counts, np.minimum(step.recent, counts)), counts, weights)


def paged(step: DecodeStep, top_p: float = 1.0) -> F32:
    """Run `spending` with whole pages: all transferred tokens are attended, and the budget counts transferred bytes.

    The value of a page is the approximate weight of its tokens. top_p: take only as many of the best pages as hold this
    share of the weight of a head.
    """
    n = step.view.layout.n
    weights = step.approximate(step.scoring_channels())
    scores = step.weigh(weights)
    pages = np.maximum(1, step.rows_for(step.budget_bytes - step.fetched_bytes) // n)
    tokens, counts = step.best_pages(scores, pages, np.minimum(step.recent, n), top_p)
    return step.attend(tokens, counts, weights)
