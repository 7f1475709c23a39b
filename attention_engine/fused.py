"""Dense attention of a decode step from FP16 to FP16, or BF16, for compiled code to call: what `methods/dense.py` and
the values on its way in and out come to, bit by bit. bf16: True or None, as in `values`."""

from __future__ import annotations

import numpy as np

from attention_engine.kernels import _attend
from attention_engine.kernels import _place as place_of
from attention_engine.values import _add_rows, _all_finite, _to_half, _widen
from csd_io.compiled import njit

__all__ = ["attend_all", "finite", "place_of"]


@njit(cache=True, nogil=True)
def finite(q, k, v, bf16):  # type: ignore[no-untyped-def]
    """Whether bits of values hold neither infinity nor NaN."""
    return _all_finite(q, bf16) and _all_finite(k, bf16) and _all_finite(v, bf16)


@njit(cache=True, nogil=True, error_model="numpy")
def attend_all(q, v, bf16, counts, tokens, places, sums, out, rows):  # type: ignore[no-untyped-def]
    """Attention over all counts (N,) tokens of each stream; whether 2 bytes hold it.

    q (B, H, G, d), v (B, H, d), the V of the last tokens, and `out` (B, H, G, d) are bits of values. sums (N, d) get v.
    tokens: as many as there may be, for each stream, (N, S). places: `place_of` the view, slots of K and of V, tokens
    of a page. rows (B, H, G, 2): see `kernels.attend`.
    """
    streams, d = sums.shape
    place, k_slots, v_slots, n = places
    _add_rows(sums, v.reshape(1, streams, d), bf16)
    wide = np.empty((streams, q.shape[2], d), np.float32)
    attended, alpha = np.empty_like(wide), np.ones(wide.shape[:2], np.float32)
    _widen(q.reshape(q.size), bf16, wide.reshape(wide.size))
    totals = rows.reshape(streams, q.shape[2], 2)
    _attend(0, streams, place, k_slots, v_slots, n, wide, tokens, counts, alpha, sums, None, attended, totals)
    return _to_half(attended.reshape(attended.size), bf16, out.reshape(out.size))
