"""Twilight (arXiv 2502.02770): keeps the fewest tokens of another selection that hold a share of the weight."""

from __future__ import annotations

import numpy as np

from attention_engine.methods.double_sparsity import in_four_bits
from attention_engine.methods.quest import choose_pages
from attention_engine.step import DecodeStep
from csd_spec.arrays import F32

P = 0.9


def twilight(step: DecodeStep, p: float = P) -> F32:
    """Apply top-p to the selection of Quest, with weights from 4-bit K."""
    tokens, counts = choose_pages(step)
    every = np.arange(step.head_dim)[None].repeat(step.streams // len(step.memory), 0)
    rows = step.table("k4", lambda k, _: in_four_bits(k, every, step.view.layout.n))
    rows = rows.reshape(step.streams, -1, step.head_dim)
    step.read_table(counts * (step.head_dim // 2 + 4))
    step.compute("logit0", "kernel", counts, step.head_dim, counts)
    logits = np.full((step.streams, step.queries, int(step.seq_lens.max())), -np.inf, np.float32)
    for stream in range(step.streams):
        chosen = tokens[stream, : counts[stream]]
        logits[stream][:, chosen] = step.q[stream] @ rows[stream, chosen].T / np.sqrt(step.head_dim)
    return step.attend(*step.best_share(step.weigh(step.bend(logits)), tokens, counts, p))
