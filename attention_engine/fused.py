"""Dense attention of one decode step from FP16 or BF16 input to output, for calls from compiled code.

The result equals `methods/dense.py` and its input and output conversions bit for bit. bf16 is True or None, as in
`values`.
"""

from __future__ import annotations

import numpy as np

from attention_engine.kernels import _attend
from attention_engine.kernels import _place as place_of
from attention_engine.values import _add_rows, _all_finite, _to_half, _widen
from csd_io.compiled import njit

__all__ = ["attend_dense", "finite", "place_of"]


@njit(cache=True, nogil=True)
def finite(q, k, v, bf16):  # type: ignore[no-untyped-def]
    """Return whether the bits of q, k and v represent neither infinity nor NaN."""
    return _all_finite(q, bf16) and _all_finite(k, bf16) and _all_finite(v, bf16)


@njit(cache=True, nogil=True, error_model="numpy")
def attend_dense(q, v, bf16, counts, tokens, places, sums, out, rows):  # type: ignore[no-untyped-def]
    """Compute attention over all counts (N,) tokens of each stream; return whether the output fits in 2 bytes.

    Args:
        q: Queries (B, H, G, d) as bits.
        v: Values (B, H, d) of the last tokens as bits.
        bf16: True for BF16, None for FP16.
        counts: Tokens of each stream, (N,).
        tokens: Token numbers of each stream, (N, S).
        places: `place_of` the view, slots of K, slots of V, and tokens of a page.
        sums: Sums of V (N, d); v is added in place.
        out: Output (B, H, G, d) as bits.
        rows: Output (B, H, G, 2); see `kernels.attend`.
    """
    streams, d = sums.shape
    place, k_slots, v_slots, n = places
    _add_rows(sums, v.reshape(1, streams, d), bf16)
    wide = np.empty((streams, q.shape[2], d), np.float32)
    attended, alpha = np.empty_like(wide), np.ones(wide.shape[:2], np.float32)
    _widen(q.reshape(q.size), bf16, wide.reshape(wide.size))
    totals = rows.reshape(streams, q.shape[2], 2)
    # int64, not a literal, whose type would make numba compile `_attend` a second time
    _attend(np.int64(0), streams, place, k_slots, v_slots, n, wide, tokens, counts, alpha, sums, None, attended, totals)
    return _to_half(attended.reshape(attended.size), bf16, out.reshape(out.size))
