"""Quest (arXiv 2406.10774): selects pages by an upper bound of their logits, from the extremes of each channel."""

from __future__ import annotations

import numpy as np

from attention_engine.step import DecodeStep
from csd_spec.arrays import F32, I32, I64


def choose_pages(step: DecodeStep) -> tuple[I32, I64]:
    """Return tokens (N, k) and counts (N,) of the pages with the largest bounds; the budget includes the bounds."""
    n, d = step.view.layout.n, step.head_dim
    entries = step.seq_lens // n  # of pages in flash; an entry has the size of a row of keys and a row of values
    extremes = step.table("quest", lambda k, _: step.rounded(np.stack([k.min(1), k.max(1)], 1)))
    step.read_table(entries * 4 * d)
    step.compute("logit0", "kernel", 2 * entries, d)
    rows = (step.q[:, query, None, :] for query in range(step.queries))
    each = [np.maximum(q * extremes[:, :, 0], q * extremes[:, :, 1]).sum(-1) for q in rows]
    if step.terms is not None:  # a bound is a logit of the last token of a page
        tokens = np.arange(n - 1, n * extremes.shape[1], n, dtype=np.int32)[None].repeat(step.streams, 0)
        logits = (np.stack(each, 1) / np.sqrt(d)).astype(np.float32)
        each = list(step.bend(logits, tokens, entries + (step.seq_lens % n > 0)).transpose(1, 0, 2))
    bounds = np.zeros(extremes.shape[:2], np.float32)
    for bound in each:
        bounds += bound  # one decision for each query group
    bounds -= bounds.min(1, keepdims=True)
    scores = np.repeat(bounds, n, axis=1)[:, : int(step.seq_lens.max())]
    return step.best_pages(scores, np.maximum(1, step.rows_for(step.budget_bytes - 4 * d * entries) // n), step.each)


def quest(step: DecodeStep) -> F32:
    """Attend to whole pages."""
    return step.attend(*choose_pages(step))
