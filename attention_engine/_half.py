"""Conversion of FP16 and BF16 bits to float32 in compiled kernels (exact, with subnormals and NaN), and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from csd_io.compiled import njit


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def half_to_float(typing_context: Any, bits: Any) -> Any:
    """Return the float32 value of a uint16 with FP16 bits; LLVM compiles it to one conversion instruction."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        half = builder.bitcast(arguments[0], ir.HalfType())
        return builder.fpext(half, ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def float_to_half(typing_context: Any, value: Any) -> Any:
    """Return the nearest FP16 bits of a float32 value as uint16; infinity outside the FP16 range."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


@njit(inline="always")
def bf16_to_float(bits):  # type: ignore[no-untyped-def]
    """Return the float32 value of a uint16 with BF16 bits, the upper half of a float32."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@njit(inline="always")
def float_to_bf16(value):  # type: ignore[no-untyped-def]
    """Return the nearest BF16 bits of a float32 value as uint16: ties to even, infinity on overflow, NaN for NaN."""
    bits = np.float32(value).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(rounded) if value == value else np.uint16(0x7FC0)
