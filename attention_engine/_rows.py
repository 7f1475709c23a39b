"""Vector arithmetic on rows of FP16 at an address: what the compiler would not do as well by itself.

Rows are read WIDTH values at a time and widened to FP32, which is exact. A dot product adds lane by lane, then folds
the lanes in halves; the values behind the last whole vector are added one by one. So its order of arithmetic depends on
the head size alone, not on the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

WIDTH = 16  # values of a vector register
_WORD, _FLOAT, _HALF = ir.IntType(64), ir.FloatType(), ir.HalfType()
_FLOATS, _HALVES = ir.VectorType(_FLOAT, WIDTH), ir.VectorType(_HALF, WIDTH)


def _load(builder: Any, address: Any, index: Any, kind: Any, size: int) -> Any:
    """A value or vector of elements of `size` bytes, `index` elements behind an address."""
    place = builder.add(address, builder.mul(index, _WORD(size)))
    return builder.load(builder.inttoptr(place, kind.as_pointer()), align=size)


def _store(builder: Any, value: Any, address: Any, index: Any) -> None:
    place = builder.add(address, builder.mul(index, _WORD(4)))
    builder.store(value, builder.inttoptr(place, value.type.as_pointer()), align=4)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    name = "llvm.fma.f32" if a.type == _FLOAT else f"llvm.fma.v{WIDTH}f32"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(a.type, [a.type] * 3), name)
    return builder.call(function, [a, b, c])


def _spread(builder: Any, value: Any) -> Any:
    """A vector of one value."""
    first = builder.insert_element(
        ir.Constant(ir.VectorType(value.type, WIDTH), ir.Undefined), value, ir.IntType(32)(0)
    )
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [0] * WIDTH)
    return builder.shuffle_vector(first, first, zeros)


def _over_row(builder: Any, count: Any, following: list[Any], step: Callable[[Any, Any], None]) -> None:
    """Call `step` with the index and the type of each part of a row of FP16: vectors, then the values behind them.

    Of rows that come later, at the addresses `following`, each cache line is asked for in passing.
    """
    line, vector = builder.and_(count, _WORD(-2 * WIDTH)), builder.and_(count, _WORD(-WIDTH))
    for address in following:
        with cgutils.for_range_slice(builder, _WORD(0), count, _WORD(2 * WIDTH), _WORD) as (index, _):
            _ask(builder, builder.add(address, builder.shl(index, _WORD(1))))
    with cgutils.for_range_slice(builder, _WORD(0), line, _WORD(2 * WIDTH), _WORD) as (index, _):
        step(index, _FLOATS)
        step(builder.add(index, _WORD(WIDTH)), _FLOATS)
    for start, end, width, kind in ((line, vector, WIDTH, _FLOATS), (vector, count, 1, _FLOAT)):
        with cgutils.for_range_slice(builder, start, end, _WORD(width), _WORD) as (index, _):
            step(index, kind)


def _ask(builder: Any, address: Any) -> None:
    """Begin to load the cache line at an address, whatever is there; changes nothing but time."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(hint, [builder.inttoptr(address, byte), word(0), word(3), word(1)])


def _values(builder: Any, row: Any, index: Any, kind: Any) -> Any:
    """FP16 values of a row, widened."""
    return builder.fpext(_load(builder, row, index, _HALVES if kind == _FLOATS else _HALF, 2), kind)


def _unpack(builder: Any, values: Any, kind: Any) -> list[Any]:
    return [builder.extract_value(values, j) for j in range(kind.count)]


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def dots(typing_context: Any, query: Any, rows: Any, following: Any, count: Any) -> Any:
    """Sums of query[i] * row_j[i], a tuple: FP32 at address `query`, FP16 at a tuple of addresses, `count` values.

    following: addresses of rows to ask for meanwhile.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        query, rows, following, count = arguments
        rows, following = _unpack(builder, rows, signature.args[1]), _unpack(builder, following, signature.args[2])
        totals = {kind: [cgutils.alloca_once(builder, kind) for _ in rows] for kind in (_FLOATS, _FLOAT)}
        for kind in totals:
            for total in totals[kind]:
                builder.store(_all(0.0, kind), total)

        def add(index: Any, kind: Any) -> None:
            factor = _load(builder, query, index, kind, 4)
            for row, total in zip(rows, totals[kind], strict=True):
                sum_ = _fma(builder, factor, _values(builder, row, index, kind), builder.load(total))
                builder.store(sum_, total)

        _over_row(builder, count, following, add)
        loaded = [(builder.load(a), builder.load(b)) for a, b in zip(totals[_FLOATS], totals[_FLOAT], strict=True)]
        folded = [builder.fadd(_fold(builder, total), single) for total, single in loaded]
        return context.make_tuple(builder, signature.return_type, folded)

    return types.UniTuple(types.float32, rows.count)(types.uint64, rows, following, types.int64), generate


def _fold(builder: Any, lanes: Any, join: Callable[[Any, Any], Any] | None = None) -> Any:
    """A vector's values joined, by default added: the upper half to the lower until one is left."""
    width = WIDTH
    while width > 1:
        width //= 2
        halves = [
            builder.shuffle_vector(
                lanes, lanes, ir.Constant(ir.VectorType(ir.IntType(32), width), list(range(first, first + width)))
            )
            for first in (0, width)
        ]
        lanes = (join or builder.fadd)(*halves)
    return builder.extract_element(lanes, ir.IntType(32)(0))


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def add_scaled(typing_context: Any, sums: Any, weights: Any, rows: Any, following: Any, count: Any) -> Any:
    """sums[i] += weights[j] * row_j[i], for each j in turn: tuples of weights and of addresses of FP16 rows.

    following: addresses of rows to ask for meanwhile.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, weights, rows, following, count = arguments
        weights = _unpack(builder, weights, signature.args[1])
        rows, following = _unpack(builder, rows, signature.args[2]), _unpack(builder, following, signature.args[3])
        factors = {_FLOATS: [_spread(builder, weight) for weight in weights], _FLOAT: weights}

        def add(index: Any, kind: Any) -> None:
            total = _load(builder, sums, index, kind, 4)
            for factor, row in zip(factors[kind], rows, strict=True):
                total = _fma(builder, factor, _values(builder, row, index, kind), total)
            _store(builder, total, sums, index)

        _over_row(builder, count, following, add)
        return context.get_dummy_value()

    return types.void(types.uint64, weights, rows, following, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def add_codes(typing_context: Any, sums: Any, weight: Any, codes: Any, shift: Any, bits: Any, count: Any) -> Any:
    """sums[i] += weight * c_i for `count` codes of `bits` bits at bit `shift` of the bytes at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, weight, codes, shift, bits, count = arguments
        byte = ir.IntType(8)
        shift, bits = builder.trunc(shift, byte), builder.trunc(bits, byte)
        mask = builder.lshr(byte(255), builder.sub(byte(8), bits))

        def add(index: Any, kind: Any) -> None:
            narrow = ir.VectorType(byte, WIDTH) if kind == _FLOATS else byte
            spread = (lambda value: _spread(builder, value)) if kind == _FLOATS else (lambda value: value)
            some = builder.and_(builder.lshr(_load(builder, codes, index, narrow, 1), spread(shift)), spread(mask))
            total = _fma(builder, spread(weight), builder.uitofp(some, kind), _load(builder, sums, index, kind, 4))
            _store(builder, total, sums, index)

        _over_row(builder, count, [], add)
        return context.get_dummy_value()

    return types.void(types.uint64, types.float32, types.uint64, types.int64, types.int64, types.int64), generate


def _all(value: float, kind: Any) -> Any:
    """A constant, in every lane where there are lanes."""
    return ir.Constant(kind, [value] * WIDTH if isinstance(kind, ir.VectorType) else value)


def _exp(builder: Any, x: Any) -> Any:
    """e^x of FP32 x <= 0 within 2 units in the last place; 0 below -87, where FP32 has subnormals only.

    x = n ln 2 + f with |f| <= ln 2 / 2: e^f by the polynomial of Cephes' expf, 2^n by its bits.
    """
    kind = x.type
    bits = ir.VectorType(ir.IntType(32), WIDTH) if kind == _FLOATS else ir.IntType(32)
    shift = _all(12582912.0, kind)  # 1.5 * 2^23: adding it leaves no bits for a fraction
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
    """e^x of one FP32 x <= 0, as `exponentials` has it."""
    return types.float32(types.float32), lambda context, builder, signature, arguments: _exp(builder, arguments[0])


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def exponentials(typing_context: Any, values: Any, count: Any, top: Any) -> Any:
    """Replace FP32 values at an address by e^(value - top); returns their sum. `count` is a multiple of WIDTH."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, count, top = arguments
        tops, total = _spread(builder, top), cgutils.alloca_once(builder, _FLOATS)
        builder.store(_all(0.0, _FLOATS), total)
        with cgutils.for_range_slice(builder, _WORD(0), count, _WORD(WIDTH), _WORD) as (index, _):
            power = _exp(builder, builder.fsub(_load(builder, values, index, _FLOATS, 4), tops))
            _store(builder, power, values, index)
            builder.store(builder.fadd(builder.load(total), power), total)
        return _fold(builder, builder.load(total))

    return types.float32(types.uint64, types.int64, types.float32), generate


def _extreme(order: str) -> Any:
    """Of FP32 values at an address the one before all others in that order, NaN left out."""

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
