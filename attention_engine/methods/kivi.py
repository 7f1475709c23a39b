"""KIVI (arXiv 2402.02750): dense attention on low-bit keys and values, K by channel and V by token."""

from __future__ import annotations

import numpy as np

from attention_engine.step import DecodeStep
from attention_engine.values import to_half, widen
from csd_spec.arrays import F32

V_GROUP = 32  # channels of V of a token that share a scale
MAX_MAGNITUDE = np.float32(2.0**126)  # half of the float32 range
PAIR_BYTES = 4  # a scale and a minimum of 2 bytes each


def kivi(step: DecodeStep, bits: int = 4) -> F32:
    """Return softmax(q K^T / sqrt(d)) V of the codes; tokens of an incomplete group stay unquantized in drive DRAM.

    K has a scale and a minimum for each channel of a token group (groups of KIVI have 32 tokens, as does a 4 KiB page
    with d = 64), V for each token and 32 channels. Codes of both share pages.
    """
    n, d, levels, bf16 = step.view.layout.n, step.head_dim, (1 << bits) - 1, step.view.layout.bf16
    k = step.table(f"k{bits}", lambda rows, _: _group(rows, n, by_channel(rows, levels, bf16)))
    v = step.table(f"v{bits}", lambda rows, _: _group(rows, n, by_token(rows, levels, bf16)), step.values)
    step.read_table(step.seq_lens // n * group_bytes(n, d, bits))
    step.chosen = step.everything(), step.seq_lens
    step.compute("logit", "kernel", step.seq_lens, d, step.seq_lens)
    step.compute("attend", "kernel", step.seq_lens, d)
    k, v = (part.reshape(step.streams, -1, d)[:, : int(step.seq_lens.max())] for part in (k, v))
    logits = step.q @ k.transpose(0, 2, 1) / np.float32(np.sqrt(d))
    beyond = np.arange(k.shape[1]) >= step.seq_lens[:, None]
    logits = np.where(beyond[:, None], np.float32(-np.inf), step.bend(logits))
    m = logits.max(-1, keepdims=True)
    weights = np.exp(logits - m)
    total = weights.sum(-1, keepdims=True)
    return step.sink(weights @ v / total, np.concatenate([m, total], -1))


def group_bytes(n: int, d: int, bits: int) -> int:
    """Return the bytes of keys and values of n tokens of d channels: codes, scales and minimums."""
    return 2 * -(-n * d * bits // 8) + PAIR_BYTES * (d + n * -(-d // V_GROUP))


def by_channel(rows: F32, levels: int, bf16: bool = False) -> F32:
    """Return the values that codes of K (H, t, d) represent, with a scale for each channel."""
    return _coded(rows, 1, levels, bf16)


def by_token(rows: F32, levels: int, bf16: bool = False) -> F32:
    """Return the values that codes of V (H, t, d) represent, with a scale for each token and 32 channels."""
    parts = [_coded(rows[..., first : first + V_GROUP], 2, levels, bf16) for first in range(0, rows.shape[2], V_GROUP)]
    return np.concatenate(parts, 2)


def _coded(rows: F32, axis: int, levels: int, bf16: bool) -> F32:
    """Return minimum + scale * code, with both in FP16 or BF16 along an axis; inputs are clamped to MAX_MAGNITUDE."""
    rows = rows.clip(-MAX_MAGNITUDE, MAX_MAGNITUDE)
    lowest, highest = rows.min(axis, keepdims=True), rows.max(axis, keepdims=True)
    scale = widen(to_half((highest - lowest) / np.float32(levels), bf16), bf16)
    codes = np.divide(rows - lowest, scale, out=np.zeros_like(rows), where=scale > 0)
    coded: F32 = lowest + scale * np.clip(np.rint(codes), 0, levels)
    return coded


def _group(rows: F32, n: int, coded: F32) -> F32:
    """Return an entry (H, n, d) of the table: a full group as coded, other groups unquantized and zero-padded."""
    full = rows.shape[1] == n
    return coded if full else np.pad(rows, ((0, 0), (0, n - rows.shape[1]), (0, 0)))
