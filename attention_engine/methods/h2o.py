"""H2O (arXiv 2306.14048): keeps recent tokens and the tokens with the largest weights so far; evicts the others."""

from __future__ import annotations

import numpy as np

from attention_engine.step import DecodeStep
from csd_spec.arrays import F32


def h2o(step: DecodeStep) -> F32:
    """Spend half of the budget on heavy hitters and half on the last tokens. An evicted token does not return.

    The first step of a sequence attends to all tokens, which gives the prompt tokens their first weights.
    memory["h2o"]: accumulated weights (H, S) of the tokens, -inf for evicted tokens.
    """
    gathered = np.full((step.streams, int(step.seq_lens.max())), -np.inf, np.float32)
    counts = step.rows_for(step.budget_bytes)
    for streams, memory in step.sequences():
        length = int(step.seq_lens[streams.start])
        sums = memory.get("h2o", np.zeros((streams.stop - streams.start, 0), np.float32))
        gathered[streams, : sums.shape[1]] = sums
        gathered[streams, sums.shape[1] : length] = 0
        if "h2o" not in memory:
            counts[streams] = length
    counts = np.minimum(counts, np.isfinite(gathered).sum(1))
    tokens = step.best_tokens(gathered, counts, counts // 2)
    weights = step.logits(tokens, counts)
    share = None if step.terms is None else step.terms.share_without_sink(weights)
    weights -= weights.max(-1, keepdims=True)
    np.exp(weights, out=weights)
    weights /= weights.sum(-1, keepdims=True)
    if share is not None:
        weights *= share
    for streams, memory in step.sequences():
        memory["h2o"] = np.full((streams.stop - streams.start, int(step.seq_lens[streams.start])), -np.inf, np.float32)
        for row, stream in enumerate(range(streams.start, streams.stop)):
            survivors, count = tokens[stream, : counts[stream]], counts[stream]
            memory["h2o"][row, survivors] = gathered[stream, survivors] + weights[stream, :, :count].sum(0)
    return step.attend(tokens, counts)
