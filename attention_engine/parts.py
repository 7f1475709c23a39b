"""A row attended in parts, in several drives or places, becomes one again.

A row is one query head's attention over its tokens. Its parts are merged by log-sum-exp, as FlashAttention (arXiv
2205.14135) does with blocks of K and V, and Flash-Decoding with splits of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from csd_spec.arrays import F32


def merge(outputs: Sequence[F32], rows: Sequence[F32]) -> tuple[F32, F32]:
    """Attention over the tokens of all parts: its output (..., d) float32, and its rows (..., 2) float32.

    outputs: of each part the attention output (..., d) over its own tokens. rows: of each part (..., 2), m and l of
    each output: l * e^m is the softmax weight of all that it stands for; m is -inf where it stands for no token, and
    then the output is not looked at. What is returned can be merged again. One part comes back with the same bits; of
    parts without a token come zeros. Raises ValueError for shapes that do not fit, for numbers that are no weights, and
    where l is 0 under a finite m: a weight that is not known, as what comes of more than FP32 holds is not.
    """
    if not len(outputs) or len(outputs) != len(rows):
        raise ValueError(f"{len(outputs)} outputs and {len(rows)} rows: one for each of one or more parts is needed")
    for number, (output, part) in enumerate(zip(outputs, rows, strict=True)):
        _check(number, output, part, np.shape(outputs[0]))
    m, l = np.moveaxis(np.asarray(rows, np.float64), -1, 0)  # noqa: E741 - each (parts, ...)
    top = m.max(axis=0)
    weights = np.where(np.isneginf(m), 0, l) * np.exp(m - np.where(np.isneginf(top), 0, top))
    total = weights.sum(axis=0)
    shares = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)[..., None]
    merged = np.where(shares[0] > 0, outputs[0], 0) * shares[0]
    for output, share in zip(outputs[1:], shares[1:], strict=True):
        merged += np.where(share > 0, output, 0) * share
    known = np.where(total <= np.finfo(np.float32).max, total, 0)
    return merged.astype(np.float32), np.stack([top, known], axis=-1).astype(np.float32)


def _check(number: int, output: F32, part: F32, shape: tuple[int, ...]) -> None:
    """Raise ValueError where a part cannot be merged."""
    if np.shape(output) != shape or np.shape(part) != (*shape[:-1], 2):
        raise ValueError(f"part {number}: output {np.shape(output)} and rows {np.shape(part)}, part 0 has {shape}")
    m, l = np.moveaxis(part, -1, 0)  # noqa: E741 - the names of the interface
    empty = np.isneginf(m)
    if not (empty | (np.isfinite(m) & np.isfinite(l) & (l >= 0))).all():
        raise ValueError(f"part {number}: its rows hold what is no logit, or no weight")
    unknown = int((~empty & (l == 0)).sum())
    if unknown:
        raise ValueError(f"part {number}: the softmax weight of {unknown} of {m.size} rows is not known (l = 0)")
