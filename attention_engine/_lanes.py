"""Vectors of 16 lanes, for kernels that combine low-bit pages with float32 rows at an address.

The order of arithmetic is the same on all machines: lanes are added in sequence, then folded in halves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from csd_spec.progressive import LANES, LINE

BYTE, SHORT, INDEX, WORD, FLOAT = *(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.FloatType()
BYTES, SUMS, FLOATS = ir.VectorType(BYTE, LINE), ir.VectorType(INDEX, LANES), ir.VectorType(FLOAT, LANES)
LANE_BYTES = ir.VectorType(BYTE, LANES)
_INTEGERS = 1.5 * 2.0**23  # added to a small float32 it yields the nearest integer in the low bits


def load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def at_offset(builder: Any, address: Any, offset: int) -> Any:
    return builder.add(address, WORD(offset))


def all_of(kind: Any, value: float) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def pick(builder: Any, vector: Any, lanes: list[int], other: Any = None) -> Any:
    order = ir.Constant(ir.VectorType(INDEX, len(lanes)), lanes)
    return builder.shuffle_vector(vector, vector if other is None else other, order)


def spread(builder: Any, value: Any, width: int = LANES) -> Any:
    one = builder.insert_element(ir.Constant(ir.VectorType(value.type, width), ir.Undefined), value, INDEX(0))
    return pick(builder, one, [0] * width)


def call(builder: Any, name: str, kind: Any, *arguments: Any) -> Any:
    of = ir.FunctionType(kind, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, of, name), arguments)


def clamped(builder: Any, values: Any, least: float, most: float) -> Any:
    low, high = all_of(values.type, least), all_of(values.type, most)
    values = builder.select(builder.fcmp_ordered("<", values, low), low, values)
    return builder.select(builder.fcmp_ordered(">", values, high), high, values)


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a x b + c, rounded once."""
    return call(builder, f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)


def rounded(builder: Any, values: Any) -> Any:
    return call(builder, f"llvm.rint.v{values.type.count}f32", values.type, values)


def nearest(builder: Any, values: Any) -> tuple[Any, Any]:
    """Return the integers nearest to 16 small float32 values, as int8 and as float32."""
    shifted = builder.fadd(values, all_of(FLOATS, _INTEGERS))
    codes = builder.trunc(builder.bitcast(shifted, SUMS), LANE_BYTES)
    return codes, builder.fsub(shifted, all_of(FLOATS, _INTEGERS))


def largest_lane(builder: Any, values: Any) -> Any:
    while values.type.count > 1:
        low, high = halves(builder, values)
        values = builder.select(builder.fcmp_ordered(">", low, high), low, high)
    return builder.extract_element(values, INDEX(0))


def halves(builder: Any, vector: Any) -> list[Any]:
    half = vector.type.count // 2
    return [pick(builder, vector, [*range(first, first + half)]) for first in (0, half)]


def folded(builder: Any, values: Any) -> Any:
    """Return the sum of the lanes of a vector, added in halves."""
    add = builder.add if isinstance(values.type.element, ir.IntType) else builder.fadd
    while values.type.count > 1:
        values = add(*halves(builder, values))
    return builder.extract_element(values, INDEX(0))


def lanes_below(builder: Any, left: Any) -> Any:
    """Return the mask of the lanes below the number of remaining values."""
    return builder.icmp_signed("<", ir.Constant(ir.VectorType(WORD, LANES), [*range(LANES)]), spread(builder, left))


def load_some(builder: Any, address: Any, left: Any) -> Any:
    """Load 16 float32 values at an address; lanes after the remaining values are 0."""
    at, live = builder.inttoptr(address, FLOATS.as_pointer()), lanes_below(builder, left)
    return call(builder, f"llvm.masked.load.v{LANES}f32.p0", FLOATS, at, INDEX(4), live, all_of(FLOATS, 0.0))


def widened(builder: Any, address: Any, bf16: Any) -> Any:
    """Load 16 FP16 or BF16 values at an address as float32."""
    bits = load(builder, address, ir.VectorType(SHORT, LANES))
    brain = builder.bitcast(builder.shl(builder.zext(bits, SUMS), all_of(SUMS, 16)), FLOATS)
    return builder.select(
        bf16, brain, builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), FLOATS)
    )


def _with_sums(function: Callable[[Any, Any], Any]) -> Any:
    """Return a function that sums `function` of vectors of 16 float32 values at an address; missing values are 0."""

    def typed(typing_context: Any, values: Any, count: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            values, count = arguments
            total = cgutils.alloca_once(builder, FLOATS)
            builder.store(all_of(FLOATS, 0.0), total)
            whole = builder.and_(count, WORD(-LANES))
            with cgutils.for_range_slice(builder, WORD(0), whole, WORD(LANES), WORD) as (index, _):
                some = load(builder, builder.add(values, builder.shl(index, WORD(2))), FLOATS)
                builder.store(builder.fadd(builder.load(total), function(builder, some)), total)
            with builder.if_then(builder.icmp_unsigned("<", whole, count)):
                some = load_some(builder, builder.add(values, builder.shl(whole, WORD(2))), builder.sub(count, whole))
                builder.store(builder.fadd(builder.load(total), function(builder, some)), total)
            return folded(builder, builder.load(total))

        return types.float32(types.uint64, types.int64), generate

    return intrinsic(typed)


total_of = _with_sums(lambda builder, values: values)
"""Return the sum of float32 values at an address, in 16 lanes that are folded in halves."""

squares_of = _with_sums(lambda builder, values: builder.fmul(values, values))
"""Return the sum of the squares of float32 values at an address, in the same order."""


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def largest_of(typing_context: Any, values: Any, count: Any) -> Any:
    """Return the largest float32 value at an address, at least 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first, count = arguments
        most = cgutils.alloca_once(builder, FLOATS)
        builder.store(all_of(FLOATS, 0.0), most)
        with cgutils.for_range_slice(builder, WORD(0), count, WORD(LANES), WORD) as (index, _):
            at, before = builder.add(first, builder.shl(index, WORD(2))), builder.load(most)
            values = load_some(builder, at, builder.sub(count, index))
            builder.store(builder.select(builder.fcmp_ordered(">", values, before), values, before), most)
        return largest_lane(builder, builder.load(most))

    return types.float32(types.uint64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def add_rows_of(typing_context: Any, out: Any, each: Any, fresh: Any, rows: Any, count: Any, size: Any) -> Any:
    """Add the first `size` float32 values of `count` rows of 16 to rows at another address.

    The target rows are `each` bytes apart. If `fresh`, the values overwrite the target.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        out, each, fresh, rows, count, size = arguments
        rows_of = cgutils.for_range_slice(builder, WORD(0), count, WORD(1), WORD)
        with rows_of as (row, _), cgutils.for_range_slice(builder, WORD(0), size, WORD(1), WORD) as (lane, _):
            place = builder.shl(lane, WORD(2))
            at = builder.add(builder.add(out, builder.mul(row, each)), place)
            more = load(builder, builder.add(builder.add(rows, builder.shl(row, WORD(6))), place), FLOAT)
            old = builder.select(fresh, FLOAT(0), load(builder, at, FLOAT))
            store(builder, builder.fadd(old, more), at)
        return context.get_dummy_value()

    words = types.uint64, types.uint64, types.boolean, types.uint64, types.int64, types.int64
    return types.void(*words), generate


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def widen_halves(typing_context: Any, out: Any, halves: Any, count: Any, bf16: Any) -> Any:
    """Write float32 values at `out` for the FP16 or BF16 values at an address; their number is rounded up to 16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        out, halves, count, bf16 = arguments
        with cgutils.for_range_slice(builder, WORD(0), count, WORD(LANES), WORD) as (index, _):
            values = widened(builder, builder.add(halves, builder.shl(index, WORD(1))), bf16)
            store(builder, values, builder.add(out, builder.shl(index, WORD(2))))
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.int64, types.boolean), generate


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def square_codes(typing_context: Any, out: Any, codes: Any, count: Any, unit: Any) -> Any:
    """Write c x |c| x unit as float32 at `out` for the int8 codes c at an address; their number is rounded up to 16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        out, codes, count, unit = arguments
        with cgutils.for_range_slice(builder, WORD(0), count, WORD(LANES), WORD) as (index, _):
            value = builder.sitofp(load(builder, builder.add(codes, index), LANE_BYTES), FLOATS)
            square = builder.fmul(value, call(builder, f"llvm.fabs.v{LANES}f32", FLOATS, value))
            square = builder.fmul(square, spread(builder, unit))
            store(builder, square, builder.add(out, builder.shl(index, WORD(2))))
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.int64, types.float32), generate
