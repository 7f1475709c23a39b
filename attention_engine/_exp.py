"""Exponentials and extreme values of float32 arrays, for softmax."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from attention_engine._rows import _FLOATS, _WORD, WIDTH, _all, _broadcast, _fma, _fold, _load, _store


def _exp(builder: Any, x: Any) -> Any:
    """Return e^x for float32 x <= 0, accurate to 2 ULP; 0 if x < -87, where float32 has subnormal values only.

    x = n ln 2 + f with |f| <= ln 2 / 2: e^f is the polynomial of expf in Cephes, and 2^n sets the exponent bits.
    """
    kind = x.type
    bits = ir.VectorType(ir.IntType(32), WIDTH) if kind == _FLOATS else ir.IntType(32)
    shift = _all(12582912.0, kind)  # 1.5 * 2^23: the addition rounds to an integer
    n = builder.fsub(_fma(builder, x, _all(1.44269504, kind), shift), shift)
    f = _fma(builder, n, _all(-0.693359375, kind), x)
    f = _fma(builder, n, _all(2.12194440e-4, kind), f)
    p = _all(1.9875691500e-4, kind)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = _fma(builder, p, f, _all(factor, kind))
    p = builder.fadd(_fma(builder, builder.fmul(p, f), f, f), _all(1.0, kind))
    inside = builder.fcmp_ordered(">", x, _all(-87.0, kind))
    power = builder.fptosi(builder.select(inside, n, _all(0.0, kind)), bits)
    power = builder.bitcast(builder.shl(builder.add(power, _all(127, bits)), _all(23, bits)), kind)
    return builder.select(inside, builder.fmul(p, power), _all(0.0, kind))


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def exp(typing_context: Any, x: Any) -> Any:
    """Return e^x of one float32 x <= 0, with the same bits as `exponentials`."""
    return types.float32(types.float32), lambda context, builder, signature, arguments: _exp(builder, arguments[0])


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def exponentials(typing_context: Any, values: Any, count: Any, top: Any) -> Any:
    """Replace float32 values at an address by e^(value - top) and return their sum. `count` is a multiple of WIDTH."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, count, top = arguments
        tops, total = _broadcast(builder, top), cgutils.alloca_once(builder, _FLOATS)
        builder.store(_all(0.0, _FLOATS), total)
        with cgutils.for_range_slice(builder, _WORD(0), count, _WORD(WIDTH), _WORD) as (index, _):
            power = _exp(builder, builder.fsub(_load(builder, values, index, _FLOATS, 4), tops))
            _store(builder, power, values, index)
            builder.store(builder.fadd(builder.load(total), power), total)
        return _fold(builder, builder.load(total))

    return types.float32(types.uint64, types.int64, types.float32), generate


def _extreme(order: str) -> Any:
    """Return a function for the largest or smallest float32 value at an address; it ignores NaN."""

    def typed(typing_context: Any, values: Any, count: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            values, count = arguments
            best = cgutils.alloca_once(builder, _FLOATS)
            builder.store(_all(float("-inf" if order == ">" else "inf"), _FLOATS), best)

            def better(a: Any, b: Any) -> Any:
                return builder.select(builder.fcmp_ordered(order, a, b), a, b)

            with cgutils.for_range_slice(builder, _WORD(0), count, _WORD(WIDTH), _WORD) as (index, _):
                builder.store(better(_load(builder, values, index, _FLOATS, 4), builder.load(best)), best)
            return _fold(builder, builder.load(best), better)

        return types.float32(types.uint64, types.int64), generate

    return intrinsic(typed)


largest, smallest = _extreme(">"), _extreme("<")
"""The largest and the smallest of FP32 values at an address, NaN left out. `count` is a multiple of WIDTH."""
