"""Values of 8 bits: E4M3 (OCP 8-bit floating point specification, revision 1.0) under a power of two for each vector.

A vector of t values is t + 1 bytes: an exponent b, then t codes. A value is its code x 2^(b - 135): b is the exponent
field of FP32's 2^(b - 127), and a code read as FP16 with a bit more of exponent is 2^-8 of itself.
"""

from __future__ import annotations

import numpy as np

from csd_spec.arrays import U8, U16

_CODES = np.arange(256, dtype=np.uint16)
_SHARES = ((_CODES & 0x80) << 8 | (_CODES & 0x7F) << 7).view(np.float16).astype(np.float32)  # 2^-8 of each code


def decoded(vectors: U8) -> U16:
    """The values (..., t) of vectors (..., t + 1), as bits of BF16, which is exact."""
    scales = (vectors[..., :1].astype(np.uint32) << np.uint32(23)).view(np.float32)
    values = _SHARES[vectors[..., 1:]] * scales
    bits: U16 = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return bits
