"""KVQuant: non-uniform codes, keys by channel and values by token, outliers of each vector kept exactly.

Source: arXiv 2401.18079, sections 3.1 (keys by channel), 3.3 (non-uniform datatype), 3.4 (1 % outliers of each
vector) and 3.5 (first token in FP16): without its outliers a vector is shifted and scaled to [-1, 1], and each value
becomes the nearest of 2^b signposts, which k-means finds.

Stored: b bits an element; an FP16 scale and zero point for each channel of keys and for each token's values; outliers
as an FP16 value and a 2-byte index, the same number in every vector and at least one; the first token in FP16; 2^b
signposts for keys and 2^b for values in FP16.

Left out: quantization before RoPE (keys have RoPE here); calibration on other text (here on the prompt itself, with a
scale for each channel of it); weights of squared gradients in k-means; Q-Norm.
"""

from __future__ import annotations

import numpy as np

from csd_spec.arrays import F32
from vcsd_eval.accuracy.published.codes import SCALE_BYTES, lloyd_max, nearest, packed_bytes, to_half
from vcsd_eval.accuracy.published.streams import VALUE_BYTES, Method, StreamOutput, Streams
from vcsd_eval.accuracy.published.tokens import attend_all

OUTLIERS = 0.01
OUTLIER_BYTES = VALUE_BYTES + 2  # a value and its index in the vector
SAMPLES = 50_000  # values that k-means sees


def outlier_count(length: int) -> int:
    """Outliers of a vector of `length` elements."""
    return max(1, round(OUTLIERS * length))


def coded(rows: F32, bits: int, axis: int) -> F32:
    """Dequantized rows.

    Args:
        rows: (N, T, d).
        bits: Bits of a code.
        axis: 1 if the vectors are channels, 2 if they are tokens.
    """
    if rows.shape[1] == 0:
        return rows
    count = outlier_count(rows.shape[axis])
    distance = np.abs(rows - rows.mean(axis, keepdims=True))
    furthest = np.argpartition(distance, -count, axis=axis).take(range(-count, 0), axis)
    outlier = np.zeros(rows.shape, np.bool_)
    np.put_along_axis(outlier, furthest, True, axis)
    low = to_half(np.where(outlier, np.float32(np.inf), rows).min(axis, keepdims=True))
    high = to_half(np.where(outlier, np.float32(-np.inf), rows).max(axis, keepdims=True))
    center, half = (high + low) / 2, (high - low) / 2
    normal = np.divide(rows - center, half, out=np.zeros_like(rows), where=half > 0)
    book = signposts(normal[~outlier], bits)
    made: F32 = np.where(outlier, rows, center + half * nearest(normal, book))
    return made


def signposts(values: F32, bits: int) -> F32:
    """The 2^bits entries of the non-uniform datatype, (2^bits,) ascending, from normalized values (M,)."""
    sample = np.sort(values[:: -(-len(values) // SAMPLES)]).astype(np.float64)
    return to_half(lloyd_max(sample, np.ones(len(sample)), 1 << bits, 100).astype(np.float32))


def encode(k: F32, v: F32, bits: int) -> tuple[F32, F32]:
    """Dequantized keys and values of a prompt, (N, prompt, d) each; the first token is exact."""
    keys, values = coded(k[:, 1:], bits, 1), coded(v[:, 1:], bits, 2)
    return np.concatenate([k[:, :1], keys], 1), np.concatenate([v[:, :1], values], 1)


def code_bytes(seen: Streams, bits: int) -> int:
    """Bytes of codes, scales, outliers and the first token, all streams; of signposts, once."""
    N, _, _, d = seen.shape
    T = seen.prompt - 1
    of_k = d * (SCALE_BYTES + OUTLIER_BYTES * outlier_count(T))
    of_v = T * (SCALE_BYTES + OUTLIER_BYTES * outlier_count(d))
    first = 2 * VALUE_BYTES * d
    return N * (2 * packed_bytes(T * d, bits) + of_k + of_v + first) + 2 * VALUE_BYTES * (1 << bits)


def kvquant(bits: int) -> Method:
    """KVQuant with `bits` bits and 1 % outliers."""

    def method(seen: Streams, budget: float) -> StreamOutput:
        prompt = seen.prompt
        k, v = seen.once(f"kvquant-{bits}", lambda: encode(seen.k[:, :prompt], seen.v[:, :prompt], bits))
        return attend_all(seen, k, v, code_bytes(seen, bits))

    return method
