"""H2O (arXiv 2306.14048): tokens that were attended most so far and recent ones; the others are forgotten."""

from __future__ import annotations

import numpy as np

from attention_engine.step import Step
from csd_spec.arrays import F32


def h2o(step: Step) -> F32:
    """Half of the budget for heavy hitters, half for the last tokens; what was left out once stays out.

    A sequence's first step attends to everything, to give the tokens of the prompt their first weights.
    memory["h2o"]: weights (H, S) that its tokens have gathered so far, -inf for what is out.
    """
    gathered = np.full((step.streams, int(step.seq_lens.max())), -np.inf, np.float32)
    counts = step.rows_for(step.budget_bytes)
    for streams, memory in step.sequences():
        length = int(step.seq_lens[streams.start])
        known = memory.get("h2o", np.zeros((streams.stop - streams.start, 0), np.float32))
        gathered[streams, : known.shape[1]] = known
        gathered[streams, known.shape[1] : length] = 0
        if "h2o" not in memory:
            counts[streams] = length
    counts = np.minimum(counts, np.isfinite(gathered).sum(1))
    tokens = step.best_tokens(gathered, counts, counts // 2)
    weights = step.logits(tokens, counts)
    share = None if step.terms is None else step.terms.kept(weights)
    weights -= weights.max(-1, keepdims=True)
    np.exp(weights, out=weights)
    weights /= weights.sum(-1, keepdims=True)
    if share is not None:
        weights *= share
    for streams, memory in step.sequences():
        memory["h2o"] = np.full((streams.stop - streams.start, int(step.seq_lens[streams.start])), -np.inf, np.float32)
        for row, stream in enumerate(range(streams.start, streams.stop)):
            kept, count = tokens[stream, : counts[stream]], counts[stream]
            memory["h2o"][row, kept] = gathered[stream, kept] + weights[stream, :, :count].sum(0)
    return step.attend(tokens, counts)
