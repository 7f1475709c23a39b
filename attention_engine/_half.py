"""FP16 bit patterns as FP32 values inside compiled kernels (exact, subnormals and NaN included)."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


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
