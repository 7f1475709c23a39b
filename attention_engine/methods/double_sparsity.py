"""Double Sparsity (arXiv 2408.07092): a few static channels in 4 bits score the tokens."""

from __future__ import annotations

import numpy as np

from attention_engine.step import DecodeStep
from csd_spec.arrays import F32, I64

LEVELS = 15


def double_sparsity(step: DecodeStep) -> F32:
    """Score the tokens with labels: r static channels of K in 4 bits, selected in the first step of a sequence.

    memory["channels"]: (H, r), the channels with the largest |q| times mean |K|.
    """
    for streams, memory in step.sequences():
        if "channels" not in memory:
            weight = np.abs(step.q[streams]).sum(1) * np.abs(step.keys(streams)).mean(1)
            memory["channels"] = np.argsort(-weight, axis=1, kind="stable")[:, : step.r]
    labels = step.table("labels", lambda k, memory: in_four_bits(k, memory["channels"], step.view.layout.n))
    channels = np.concatenate([memory["channels"] for _, memory in step.sequences()])
    r = channels.shape[1]
    label_bytes = step.seq_lens * (r // 2 + 4)  # codes, a scale and a minimum
    step.read_table(label_bytes)
    step.compute("logit0", "kernel", r * step.each, step.seq_lens, step.seq_lens)
    q = np.take_along_axis(step.q, channels[:, None, :], 2)
    weights = np.einsum("ngr,ntr->ngt", q, labels.reshape(step.streams, -1, r)[:, : int(step.seq_lens.max())])
    chosen, whole = (np.abs(vectors).sum(-1, keepdims=True) for vectors in (q, step.q))
    share = np.divide(chosen, whole, out=np.ones_like(chosen), where=chosen > 0)  # if 0, logits are 0, as in SparF
    weights = step.bend(np.ascontiguousarray(weights / np.sqrt(step.head_dim * share), np.float32))
    counts = step.rows_for(step.budget_bytes - label_bytes)
    return step.attend(step.best_tokens(step.weigh(weights), counts, np.minimum(step.recent, counts)), counts)


def in_four_bits(k: F32, channels: I64, n: int) -> F32:
    """Return the values (H, n, r) of 4-bit codes with a scale and a minimum for each row, zero-padded."""
    rows = np.take_along_axis(k, channels[:, None, :], 2)
    least = rows.min(-1, keepdims=True)
    step = np.maximum((rows.max(-1, keepdims=True) - least) / LEVELS, 1e-12)
    coded: F32 = least + step * np.rint((rows - least) / step)
    return np.pad(coded, ((0, 0), (0, n - coded.shape[1]), (0, 0)))
