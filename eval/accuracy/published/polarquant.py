"""PolarQuant: angles of recursive polar coordinates after a random rotation.

Source: arXiv 2502.02617, section 3 and Algorithm 1: blocks of 16 rotated coordinates become polar in 4 levels. Level 1
turns 8 pairs into 8 radii and 8 angles in [0, 2 pi); each further level turns pairs of radii into radii and angles in
[0, pi / 2]. Angles are coded, 4 bits at level 1 and 2 bits after that, by the best codebook of their distribution for a
normal vector: even at level 1, density sin(2 a)^(2^(l - 1) - 1) at level l.

Stored: 46 bits of angles and an FP16 radius for each 16 coordinates: 3.875 bits a coordinate, of keys and of values.

Left out: codebooks from k-means on the prompt, the paper's online variant. The rotation and the codebooks are the same
for all data and are not counted.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from csd_spec.arrays import F32
from vcsd_eval.accuracy.published.codes import lloyd_max, nearest, random_orthogonal, to_half
from vcsd_eval.accuracy.published.streams import VALUE_BYTES, StreamOutput, Streams
from vcsd_eval.accuracy.published.tokens import attend_all

BLOCK = 16
LEVEL_BITS = 4, 2, 2, 2
ANGLE_BITS = sum(bits * (BLOCK >> level) for level, bits in enumerate(LEVEL_BITS, 1))  # of a block


@cache
def angle_codebook(level: int) -> F32:
    """Angles, ascending, (2^bits,) float32, of a level from 1 to 4."""
    count = 1 << LEVEL_BITS[level - 1]
    if level == 1:
        return ((np.arange(count) + 0.5) / count * 2 * np.pi).astype(np.float32)
    a = (np.arange(50_000) + 0.5) / 50_000 * np.pi / 2
    return lloyd_max(a, np.sin(2 * a) ** (2 ** (level - 1) - 1), count).astype(np.float32)


def coded(rows: F32) -> F32:
    """Dequantized rows (..., d), rotated back; d is a multiple of 16."""
    rotation = random_orthogonal(rows.shape[-1])
    radius = (rows @ rotation).reshape(*rows.shape[:-1], -1, BLOCK)
    angles = []
    for level in range(1, len(LEVEL_BITS) + 1):
        x, y = radius[..., 0::2], radius[..., 1::2]
        angle = np.arctan2(y, x) % np.float32(2 * np.pi)
        angles.append(nearest(angle, angle_codebook(level)))
        radius = np.sqrt(x * x + y * y)
    radius = to_half(radius)
    for angle in reversed(angles):
        radius = np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1).reshape(*angle.shape[:-1], -1)
    made: F32 = radius.reshape(rows.shape) @ rotation.T
    return made


def code_bytes(seen: Streams) -> int:
    """Bytes of angles and radii of keys and values of the prompt, all streams."""
    N, _, _, d = seen.shape
    row = -(-d // BLOCK * ANGLE_BITS // 8) + VALUE_BYTES * d // BLOCK
    return 2 * N * seen.prompt * row


def polarquant(seen: Streams, budget: float) -> StreamOutput:
    """Attend to all tokens in 3.875 bits."""
    prompt = seen.prompt
    k, v = seen.once("polarquant", lambda: (coded(seen.k[:, :prompt]), coded(seen.v[:, :prompt])))
    return attend_all(seen, k, v, code_bytes(seen))
