"""What the pages make worth doing: choose whole ones, score all channels of a copy in few bits, spend by need."""

from __future__ import annotations

import numpy as np

from attention_engine.step import F32, Step


def paged(step: Step, top_p: float = 1.0) -> F32:
    """SparF by whole pages: what crosses the channel anyway is attended.

    A page's value is its tokens' approximate weight. The budget counts bytes fetched, what scoring costs included. A
    copy of K whose pages hold all channels is scored by all. top_p: of the best pages, only those that hold this share
    of a head's weight.
    """
    lay = step.view.layout
    channels = step.all_channels() if lay.m == lay.head_dim else step.top_channels(step.r)
    weights = step.approximate(channels)
    scores = step.weigh(weights)
    left = step.budget_tokens - step.fetched_bytes // (4 * step.head_dim)
    tokens, counts = step.best_pages(scores, np.maximum(1, left // lay.n), np.minimum(step.recent, lay.n), top_p)
    return step.attend(tokens, counts, weights)
