"""A window of recent tokens and the first tokens (LM-Infinite, arXiv 2308.16137; StreamingLLM, arXiv 2309.17453)."""

from __future__ import annotations

import numpy as np

from attention_engine.step import DecodeStep
from csd_spec.arrays import F32

SINKS = 4


def local(step: DecodeStep) -> F32:
    """Attend to the first SINKS tokens and the last tokens."""
    counts = step.rows_for(step.budget_bytes)
    index = np.arange(int(counts.max()), dtype=np.int32)[None, :]
    behind = (step.seq_lens - counts)[:, None]
    tokens = np.where(index < np.minimum(SINKS, counts)[:, None], index, index + behind).astype(np.int32)
    return step.attend(tokens, counts)
