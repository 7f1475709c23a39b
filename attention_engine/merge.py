"""Merges a row of attention that was computed in parts, on several drives or locations.

A row is the attention of one query head over its tokens. Parts are merged by log-sum-exp, as in FlashAttention (arXiv
2205.14135) for blocks of keys and values, and in Flash-Decoding for splits of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from csd_spec.arrays import F32


def merge(outputs: Sequence[F32], rows: Sequence[F32]) -> tuple[F32, F32]:
    """Merge parts to the attention over all tokens.

    One part is returned with the same bits. The result can be merged again. If no part has tokens, the result is zero.

    Args:
        outputs: Attention output of each part over its own tokens, (..., d).
        rows: m and l of each output, (..., 2). l * e^m is the softmax weight of the tokens of the part. m is -inf if
            the part has no tokens; its output is then ignored.

    Returns:
        The output (..., d) float32 and its rows (..., 2) float32.

    Raises:
        ValueError: Shapes do not match, a row is not a valid weight, or l is 0 and m is finite: the weight is unknown
            because it exceeds float32.
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
    finite = np.where(total <= np.finfo(np.float32).max, total, 0)
    return merged.astype(np.float32), np.stack([top, finite], axis=-1).astype(np.float32)


def _check(number: int, output: F32, part: F32, shape: tuple[int, ...]) -> None:
    """Raise ValueError if a part cannot be merged."""
    if np.shape(output) != shape or np.shape(part) != (*shape[:-1], 2):
        raise ValueError(f"part {number}: output {np.shape(output)} and rows {np.shape(part)}, part 0 has {shape}")
    m, l = np.moveaxis(part, -1, 0)  # noqa: E741 - the names of the interface
    empty = np.isneginf(m)
    if not (empty | (np.isfinite(m) & np.isfinite(l) & (l >= 0))).all():
        raise ValueError(f"part {number}: rows: m must be a finite logit or -inf, l a finite weight of at least 0")
    unknown = int((~empty & (l == 0)).sum())
    if unknown:
        raise ValueError(f"part {number}: the softmax weight of {unknown} of {m.size} rows is not known (l = 0)")
