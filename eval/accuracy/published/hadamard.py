"""INT4 keys and values after a Hadamard rotation, the KV cache quantization of QuaRot.

Source: arXiv 2404.00456, section 4 (KV caches): each head's keys, after RoPE, and values are multiplied by a Hadamard
matrix; each row is quantized asymmetrically to 4 bits in groups of 128 channels with a clipping ratio of 0.95.

Stored: 4 bits for each channel; an FP16 scale and zero point for each row of at most 128 channels.

Left out: weights and activations in 4 bits. If d is not a power of two, the matrix has blocks of
the largest power of two that divides d.
"""

from __future__ import annotations

from csd_spec.arrays import F32
from vcsd_eval.accuracy.published.codes import SCALE_BYTES, hadamard, packed_bytes, uniform_in_groups
from vcsd_eval.accuracy.published.streams import StreamOutput, Streams
from vcsd_eval.accuracy.published.tokens import attend_all

BITS, GROUP, CLIP = 4, 128, 0.95


def coded(rows: F32) -> F32:
    """Dequantized rows (N, T, d), rotated back."""
    rotation = hadamard(rows.shape[-1])
    made: F32 = uniform_in_groups(rows @ rotation, BITS, 2, GROUP, CLIP) @ rotation.T
    return made


def code_bytes(seen: Streams) -> int:
    """Bytes of codes, scales and zero points of the prompt, all streams."""
    N, _, _, d = seen.shape
    return 2 * N * seen.prompt * (packed_bytes(d, BITS) + SCALE_BYTES * -(-d // GROUP))


def hadamard_int4(seen: Streams, budget: float) -> StreamOutput:
    """Attend to all tokens in 4 bits."""
    prompt = seen.prompt
    k, v = seen.once("hadamard-int4", lambda: (coded(seen.k[:, :prompt]), coded(seen.v[:, :prompt])))
    return attend_all(seen, k, v, code_bytes(seen))
