"""FP16 and BF16: values are stored unmodified."""

from __future__ import annotations

import numpy as np

from csd_spec.arrays import U8, U16
from csd_spec.codecs.codec import Codec
from csd_spec.model import FP16_BYTES


def row_bytes(values: int) -> int:
    """Bytes of a vector."""
    return FP16_BYTES * values


def encode(values: U16) -> U8:
    """Bytes (..., 2 t) of values (..., t)."""
    return np.ascontiguousarray(values).view(np.uint8)


def decode(vectors: U8, values: int) -> U16:
    """Values (..., t) of bytes (..., 2 t)."""
    return np.ascontiguousarray(vectors[..., : row_bytes(values)]).view(np.uint16)


FP16 = Codec("fp16", "fp16", row_bytes, encode, decode, exact=True, tag=0)
BF16 = Codec("bf16", "bf16", row_bytes, encode, decode, exact=True, tag=2)
