"""FP16 values on their way in and out of FP32 arithmetic: what a step does with them besides attention."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from attention_engine._half import float_to_half, half_to_float
from csd_spec.arrays import F16, F32, I64, U16


@njit(cache=True, nogil=True)
def _add_rows(sums, rows):  # type: ignore[no-untyped-def]
    for t in range(rows.shape[0]):
        for head in range(rows.shape[1]):
            for channel in range(rows.shape[2]):
                sums[head, channel] += half_to_float(rows[t, head, channel])


@njit(cache=True, nogil=True)
def _widen(bits, values):  # type: ignore[no-untyped-def]
    for i in range(bits.size):
        values[i] = half_to_float(bits[i])


@njit(cache=True, nogil=True, error_model="numpy")
def _take_in(q_bits, v_bits, seq_lens, q, sums, means):  # type: ignore[no-untyped-def]
    _widen(q_bits, q.reshape(q.size))
    _add_rows(sums.reshape(v_bits.shape[1:]), v_bits)
    for stream in range(seq_lens.size):
        length = np.float32(seq_lens[stream])
        for channel in range(means.shape[1]):
            means[stream, channel] = sums[stream, channel] / length


@njit(cache=True, nogil=True)
def _all_finite(bits):  # type: ignore[no-untyped-def]
    """Whether no value of FP16 has the largest exponent."""
    found, bits = 0, bits.reshape(bits.size)
    for i in range(bits.size):
        found += (bits[i] & np.uint16(0x7C00)) == np.uint16(0x7C00)
    return found == 0


@njit(cache=True, nogil=True)
def _to_half(values, out):  # type: ignore[no-untyped-def]
    for i in range(values.size):
        out[i] = float_to_half(values[i])
    return _all_finite(out)


def all_finite(values: NDArray[Any], bf16: bool = False) -> bool:
    """Whether FP16 or FP32 values, contiguous, hold neither infinity nor NaN. bf16: whether 2 bytes are BF16."""
    if bf16:
        return bool(((values.view(np.uint16) & 0x7F80) != 0x7F80).all())
    if values.dtype.char == "e":  # comparing a type with a class would take as long as the rest
        return bool(_all_finite(values.view(np.uint16)))
    return bool(np.isfinite(values).all())


def widen(values: F16, bf16: bool) -> F32:
    """Values as FP32, exactly; bf16: whether they are BF16, of whatever type their array is."""
    if not bf16:
        return values.astype(np.float32)
    bits = values.view(np.uint16).astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def _to_bf16(values: F32) -> F16:
    """The nearest BF16, ties to even."""
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.float16)
    if not (np.isfinite(values).all() and all_finite(rounded, True)):
        raise FloatingPointError("its output holds NaN or values beyond BF16's range")
    return rounded


def to_half(values: F32, bf16: bool = False) -> F16:
    """Values, contiguous, as FP16, or BF16 in an array of the same type; raises FloatingPointError for what is beyond
    its range, or NaN."""
    if bf16:
        return _to_bf16(values)
    out = np.empty(values.shape, np.uint16)
    if not _to_half(values.reshape(-1), out.reshape(-1)):
        raise FloatingPointError("its output holds NaN or values beyond FP16's range")
    return out.view(np.float16)


def take_in(q: F16, v: F16, seq_lens: I64, sums: F32, bf16: bool = False) -> tuple[F32, F32]:
    """What a step begins with: q (B, H, G, d) as FP32, (N, G, d), and the means (N, d) of V over seq_lens (N,), when v
    (B, H, d) is added to its sums (N, d), in place."""
    streams, d = sums.shape
    if bf16:
        sums += widen(v, bf16).reshape(streams, d)
        lengths: F32 = seq_lens[:, None].astype(np.float32)
        return widen(q, bf16).reshape(streams, q.shape[2], d), np.divide(sums, lengths, dtype=np.float32)
    out, means = np.empty((streams, q.shape[2], d), np.float32), np.empty((streams, d), np.float32)
    _take_in(q.view(np.uint16).reshape(-1), v.view(np.uint16).reshape(1, streams, d), seq_lens, out, sums, means)
    return out, means


def add_rows(sums: F32, rows: U16, bf16: bool = False) -> None:
    """Add rows (t, H, d) of FP16 bits, or of BF16, to sums (H, d), in token order."""
    if bf16:
        for row in widen(rows.view(np.float16), bf16):
            sums += row
        return
    _add_rows(sums, rows)
