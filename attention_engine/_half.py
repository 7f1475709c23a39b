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
