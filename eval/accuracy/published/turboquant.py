"""TurboQuant: random rotation, then the Lloyd-Max codebook of a coordinate of a random unit vector.

Source: arXiv 2504.19874. TurboQuant_mse (Algorithm 1): a row is divided by its norm and rotated; each coordinate
becomes the nearest entry of the codebook. TurboQuant_prod (Algorithm 2): one bit less for these codes, and the residual
r as sign(S r) of a Gaussian matrix S (QJL); sqrt(pi / 2) / d |r| S^T sign(S r) is added, and products with queries have
no bias.

`turboquant-b` codes keys and values with TurboQuant_mse, `turboquant-prod-b` codes keys with TurboQuant_prod. Both are
here: which one the paper's KV cache experiments use for keys was not found.

Stored: b bits for each channel of keys and values; an FP16 norm for each row, with QJL also one of the residual.

Left out: outlier channels with one bit more, by which the paper gets 2.5 and 3.5 bits; entropy coding. The rotation,
S and the codebook are the same for all data and are not counted.
"""

from __future__ import annotations

import numpy as np

from csd_spec.arrays import F32
from vcsd_eval.accuracy.published.codes import (
    SEED,
    gaussian_matrix,
    nearest,
    packed_bytes,
    random_orthogonal,
    sphere_codebook,
    to_half,
)
from vcsd_eval.accuracy.published.streams import VALUE_BYTES, Method, StreamOutput, Streams
from vcsd_eval.accuracy.published.tokens import attend_all


def norms_of(rows: F32) -> F32:
    """Euclidean norms along the last axis, kept as an axis of one element."""
    result: F32 = np.sqrt(np.square(rows).sum(-1, keepdims=True))
    return result


def coded_mse(rows: F32, bits: int) -> F32:
    """Dequantized rows (..., d) of TurboQuant_mse; with 0 bits they are 0."""
    if bits == 0:
        return np.zeros_like(rows)
    d = rows.shape[-1]
    norms, rotation = norms_of(rows), random_orthogonal(d)
    unit = np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0)
    made: F32 = nearest(unit @ rotation, sphere_codebook(d, 1 << bits)) @ rotation.T * to_half(norms)
    return made


def coded_prod(rows: F32, bits: int) -> F32:
    """Dequantized rows (..., d) of TurboQuant_prod: products with them have no bias."""
    d = rows.shape[-1]
    coarse = coded_mse(rows, bits - 1)
    residual, sketch = rows - coarse, gaussian_matrix(d, d, SEED + 1)
    signs = np.where(residual @ sketch.T > 0, np.float32(1), np.float32(-1))
    made: F32 = np.matmul(signs, sketch) * (to_half(norms_of(residual)) * np.float32(np.sqrt(np.pi / 2) / d))
    made += coarse
    return made


def code_bytes(seen: Streams, bits: int, prod: bool) -> int:
    """Bytes of codes and norms of keys and values of the prompt, all streams."""
    N, _, _, d = seen.shape
    return N * seen.prompt * (2 * packed_bytes(d, bits) + VALUE_BYTES * (3 if prod else 2))


def turboquant(bits: int, prod: bool = False) -> Method:
    """TurboQuant with `bits` bits for each channel.

    Args:
        bits: Bits of a channel of keys and of values.
        prod: Whether keys are coded for products without bias.
    """

    def encode(k: F32, v: F32) -> tuple[F32, F32]:
        return (coded_prod if prod else coded_mse)(k, bits), coded_mse(v, bits)

    def method(seen: Streams, budget: float) -> StreamOutput:
        prompt = seen.prompt
        k, v = seen.once(f"turboquant-{bits}-{prod}", lambda: encode(seen.k[:, :prompt], seen.v[:, :prompt]))
        return attend_all(seen, k, v, code_bytes(seen, bits, prod))

    return method
