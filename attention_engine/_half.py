"""FP16 and BF16 bit patterns as FP32 values inside compiled kernels (exact, subnormals and NaN included)."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from csd_io.compiled import njit


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def half_to_float(typing_context: Any, bits: Any) -> Any:
    """The FP32 value of a uint16 that holds FP16 bits; LLVM turns it into one conversion instruction."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        half = builder.bitcast(arguments[0], ir.HalfType())
        return builder.fpext(half, ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def float_to_half(typing_context: Any, value: Any) -> Any:
    """The FP16 bits, as uint16, nearest to an FP32 value; infinity beyond FP16's range."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


@njit(inline="always")
def brain_to_float(bits):  # type: ignore[no-untyped-def]
    """The FP32 value of a uint16 that holds BF16 bits, which are FP32's upper half."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@njit(inline="always")
def float_to_brain(value):  # type: ignore[no-untyped-def]
    """The BF16 bits, as uint16, nearest to an FP32 value, ties to even; infinity beyond BF16's range, NaN of NaN."""
    bits = np.float32(value).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(rounded) if value == value else np.uint16(0x7FC0)
