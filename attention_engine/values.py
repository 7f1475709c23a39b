"""Conversion of FP16 and BF16 to float32 and back, for the steps before and after attention.

BF16 values are stored in FP16 arrays; `bf16` marks such an array. For compiled loops it is True or None, so that each
type has its own specialization.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attention_engine._half import bf16_to_float, float_to_bf16, float_to_half, half_to_float
from csd_io.compiled import njit
from csd_spec.arrays import F16, F32, I32, I64, U16


@njit(inline="always")
def _value(bits, bf16):  # type: ignore[no-untyped-def]
    return bf16_to_float(bits) if bf16 is not None else half_to_float(bits)


@njit(cache=True, nogil=True)
def _widen(bits, bf16, out):  # type: ignore[no-untyped-def]
    for i in range(bits.size):
        out[i] = _value(bits[i], bf16)


@njit(cache=True, nogil=True)
def _add_rows(sums, rows, bf16):  # type: ignore[no-untyped-def]
    for t in range(rows.shape[0]):
        for head in range(rows.shape[1]):
            for channel in range(rows.shape[2]):
                sums[head, channel] += _value(rows[t, head, channel], bf16)


@njit(cache=True, nogil=True, error_model="numpy")
def _widen_inputs(q_bits, v_bits, bf16, seq_lens, q, sums, means):  # type: ignore[no-untyped-def]
    _widen(q_bits, bf16, q.reshape(q.size))
    _add_rows(sums.reshape(v_bits.shape[1:]), v_bits, bf16)
    for stream in range(seq_lens.size):
        length = np.float32(seq_lens[stream])
        for channel in range(means.shape[1]):
            means[stream, channel] = sums[stream, channel] / length


@njit(cache=True, nogil=True)
def _all_finite(bits, bf16):  # type: ignore[no-untyped-def]
    """Return whether no value has the largest exponent."""
    infinite, bits = 0, bits.reshape(bits.size)
    largest = np.uint16(0x7F80) if bf16 is not None else np.uint16(0x7C00)
    for i in range(bits.size):
        infinite += (bits[i] & largest) == largest
    return infinite == 0


@njit(cache=True, nogil=True)
def _to_half(values, bf16, out):  # type: ignore[no-untyped-def]
    for i in range(values.size):
        out[i] = float_to_bf16(values[i]) if bf16 is not None else float_to_half(values[i])
    return _all_finite(out, bf16)


def all_finite(values: NDArray[Any], bf16: bool = False) -> bool:
    """Return whether contiguous 2-byte or float32 values contain neither infinity nor NaN."""
    if values.dtype.char == "e":  # a comparison with a class would double the time
        return bool(_all_finite(values.view(np.uint16), bf16 or None))
    return bool(np.isfinite(values).all())


def widen(values: F16, bf16: bool) -> F32:
    """Return the values as float32, exactly."""
    out = np.empty(values.shape, np.float32)
    _widen(values.view(np.uint16).reshape(-1), bf16 or None, out.reshape(-1))
    return out


def to_half(values: F32, bf16: bool = False) -> F16:
    """Round contiguous values to 2 bytes, ties to even.

    Raises:
        FloatingPointError: A value is NaN or outside the range of the type.
    """
    out = np.empty(values.shape, np.uint16)
    if not _to_half(values.reshape(-1), bf16 or None, out.reshape(-1)):
        raise FloatingPointError(f"its output holds NaN or values beyond {'BF16' if bf16 else 'FP16'}'s range")
    return out.view(np.float16)


def widen_inputs(q: F16, v: F16, seq_lens: I64, sums: F32, bf16: bool = False) -> tuple[F32, F32]:
    """Prepare the inputs of a step: widen q, add v to its sums in place, and compute the means of V.

    Args:
        q: Queries, (B, H, G, d).
        v: Values of the last tokens, (B, H, d).
        seq_lens: Tokens of each stream, (N,).
        sums: Sums of V, (N, d).
        bf16: Whether q and v are BF16.

    Returns:
        q (N, G, d) and the means (N, d) of V over seq_lens, as float32.
    """
    streams, d = sums.shape
    out, means = np.empty((streams, q.shape[2], d), np.float32), np.empty((streams, d), np.float32)
    bits = q.view(np.uint16).reshape(-1), v.view(np.uint16).reshape(1, streams, d)
    _widen_inputs(*bits, bf16 or None, seq_lens, out, sums, means)
    return out, means


def add_rows(sums: F32, rows: U16, bf16: bool = False) -> None:
    """Add rows (t, H, d) of bits to sums (H, d), in token order."""
    _add_rows(sums, rows, bf16 or None)


def first_tokens(streams: int, tokens: int) -> I32:
    """Return the first tokens for each stream, (N, tokens). It is ten times as fast as `np.broadcast_to` of one row."""
    row = _ascending(tokens.bit_length())
    return np.ndarray((streams, tokens), np.int32, row, strides=(0, row.itemsize))


@cache
def _ascending(bits: int) -> I32:
    """Return all tokens below 2^bits."""
    return np.arange(1 << bits, dtype=np.int32)
