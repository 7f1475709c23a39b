"""Vector arithmetic on FP16 rows at an address, with instructions that the compiler does not select on its own.

Rows are read WIDTH values at a time and widened to float32, which is exact. A dot product adds lane by lane, then folds
the lanes in halves; values after the last full vector are added one at a time. The order of arithmetic depends on the
head size only, not on the machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from csd_io.compiled import njit

WIDTH = 16  # values of a vector register
MAX_ACCUMULATORS = 4  # vectors of sums that stay in registers for one query
TAG_SHIFT = 62  # position of the codec tag (`csd_spec.codecs`) in the address of its rows
BF16_ROWS, FP8_ROWS = 2 << TAG_SHIFT, 3 << TAG_SHIFT
ADDRESS = (1 << 62) - 1
_LINE = 64  # bytes of a cache line
_WORD, _FLOAT, _HALF = ir.IntType(64), ir.FloatType(), ir.HalfType()
_FLOATS, _HALVES = ir.VectorType(_FLOAT, WIDTH), ir.VectorType(_HALF, WIDTH)


def _load(builder: Any, address: Any, index: Any, kind: Any, size: int) -> Any:
    """Load a value or a vector of elements of `size` bytes from index `index` of an array."""
    place = builder.add(address, builder.mul(index, _WORD(size)))
    return builder.load(builder.inttoptr(place, kind.as_pointer()), align=size)


def _store(builder: Any, value: Any, address: Any, index: Any) -> None:
    place = builder.add(address, builder.mul(index, _WORD(4)))
    builder.store(value, builder.inttoptr(place, value.type.as_pointer()), align=4)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    name = "llvm.fma.f32" if a.type == _FLOAT else f"llvm.fma.v{WIDTH}f32"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(a.type, [a.type] * 3), name)
    return builder.call(function, [a, b, c])


def _broadcast(builder: Any, value: Any, width: int = WIDTH) -> Any:
    """Return a vector with one value in all lanes."""
    first = builder.insert_element(
        ir.Constant(ir.VectorType(value.type, width), ir.Undefined), value, ir.IntType(32)(0)
    )
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width)
    return builder.shuffle_vector(first, first, zeros)


def _over_row(builder: Any, count: Any, step: Callable[[Any, Any], None]) -> None:
    """Call `step` with the index and type of each part of an FP16 row: full vectors, then the remaining values."""
    line, vector = builder.and_(count, _WORD(-2 * WIDTH)), builder.and_(count, _WORD(-WIDTH))
    with cgutils.for_range_slice(builder, _WORD(0), line, _WORD(2 * WIDTH), _WORD) as (index, _):
        step(index, _FLOATS)
        step(builder.add(index, _WORD(WIDTH)), _FLOATS)
    for start, end, width, kind in ((line, vector, WIDTH, _FLOATS), (vector, count, 1, _FLOAT)):
        with cgutils.for_range_slice(builder, start, end, _WORD(width), _WORD) as (index, _):
            step(index, kind)


def _prefetch_line(builder: Any, address: Any) -> None:
    """Prefetch the cache line at an address into the L2 cache, which supports more outstanding loads than L1.

    The prefetch affects run time only, for any address.
    """
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(hint, [builder.inttoptr(address, byte), word(0), word(2), word(1)])


def _fp16_values(builder: Any, row: Any, index: Any, kind: Any) -> Any:
    """Load FP16 values of a row as float32."""
    return builder.fpext(_load(builder, row, index, _HALVES if kind == _FLOATS else _HALF, 2), kind)


def _bf16_values(builder: Any, row: Any, index: Any, kind: Any) -> Any:
    """Load BF16 values of a row as float32. BF16 is the upper half of a float32."""
    short, word = ir.IntType(16), ir.IntType(32)
    shift: Any = word(16)
    if kind == _FLOATS:
        short, word = ir.VectorType(short, WIDTH), ir.VectorType(word, WIDTH)
        shift = ir.Constant(word, [16] * WIDTH)
    return builder.bitcast(builder.shl(builder.zext(_load(builder, row, index, short, 2), word), shift), kind)


def _fp8_values(builder: Any, row: Any, index: Any, kind: Any) -> Any:
    """Load 8-bit values of a row as float32. A row starts with its exponent.

    Codes are FP16 values with a 4-bit exponent, multiplied by 2^-8.
    """
    byte, short, word, half = ir.IntType(8), ir.IntType(16), ir.IntType(32), _HALF
    scale = builder.bitcast(builder.shl(builder.zext(_load(builder, row, _WORD(0), byte, 1), word), word(23)), _FLOAT)
    if kind == _FLOATS:
        byte, short, half = (ir.VectorType(each, WIDTH) for each in (byte, short, half))
        scale = _broadcast(builder, scale)
    code = builder.zext(_load(builder, row, builder.add(index, _WORD(1)), byte, 1), short)
    sign, size = (builder.and_(code, _all(mask, short)) for mask in (0x80, 0x7F))
    bits = builder.or_(builder.shl(sign, _all(8, short)), builder.shl(size, _all(7, short)))
    return builder.fmul(builder.fpext(builder.bitcast(bits, half), kind), scale)


def _by_kind(builder: Any, row: Any, act: Callable[[Callable[..., Any]], None]) -> None:
    """Call `act` with the load function for the codec in the tag of the address."""
    with builder.if_else(builder.icmp_unsigned(">=", row, _WORD(BF16_ROWS)), likely=False) as (other, half):
        with other, builder.if_else(builder.icmp_unsigned(">=", row, _WORD(FP8_ROWS)), likely=False) as (eight, brain):
            with eight:
                act(_fp8_values)
            with brain:
                act(_bf16_values)
        with half:
            act(_fp16_values)


def _over_rows(builder: Any, count: Any, rows: list[Any], step: Callable[[Any, Any, list[Any]], None]) -> None:
    """Call `step` like `_over_row`, with the values of rows at addresses. All rows have the codec of the first row."""

    def over(values: Callable[..., Any]) -> None:
        places = rows if values is _fp16_values else [builder.and_(row, _WORD(ADDRESS)) for row in rows]
        _over_row(
            builder, count, lambda index, kind: step(index, kind, [values(builder, row, index, kind) for row in places])
        )

    _by_kind(builder, rows[0], over)


def _unpack(builder: Any, values: Any, kind: Any) -> list[Any]:
    return [builder.extract_value(values, j) for j in range(kind.count)]


@njit(inline="always")
def untagged_address(row):  # type: ignore[no-untyped-def]
    """Return an address without its codec tag."""
    return row & np.uint64(ADDRESS)


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def prefetch(typing_context: Any, addresses: Any, nbytes: Any) -> Any:
    """Prefetch `nbytes` bytes at each address of a tuple."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        for address in _unpack(builder, arguments[0], signature.args[0]):
            with cgutils.for_range_slice(builder, _WORD(0), arguments[1], _WORD(_LINE), _WORD) as (offset, _):
                _prefetch_line(builder, builder.add(builder.and_(address, _WORD(ADDRESS)), offset))
        return context.get_dummy_value()

    return types.void(addresses, types.int64), generate


def _products(builder: Any, queries: list[Any], rows: list[Any], count: Any) -> Any:
    """Return a vector of the dot products of float32 queries and rows at addresses, ordered by query; at most WIDTH."""
    pairs = [*itertools.product(range(len(queries)), range(len(rows)))]
    totals = {kind: [cgutils.alloca_once(builder, kind) for _ in pairs] for kind in (_FLOATS, _FLOAT)}
    for kind in totals:
        for total in totals[kind]:
            builder.store(_all(0.0, kind), total)

    def add(index: Any, kind: Any, values: list[Any]) -> None:
        factors = [_load(builder, query, index, kind, 4) for query in queries]
        for (i, j), total in zip(pairs, totals[kind], strict=True):
            builder.store(_fma(builder, factors[i], values[j], builder.load(total)), total)

    _over_rows(builder, count, rows, add)
    lanes = ir.VectorType(_FLOAT, len(pairs))
    sums, singles = cgutils.alloca_once(builder, lanes), ir.Constant(lanes, ir.Undefined)
    builder.store(_folded(builder, [builder.load(total) for total in totals[_FLOATS]]), sums)
    with builder.if_then(builder.icmp_unsigned("!=", builder.and_(count, _WORD(WIDTH - 1)), _WORD(0)), likely=False):
        for i, total in enumerate(totals[_FLOAT]):
            singles = builder.insert_element(singles, builder.load(total), ir.IntType(32)(i))
        builder.store(builder.fadd(builder.load(sums), singles), sums)
    return builder.load(sums)


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def dot(typing_context: Any, query: Any, row: Any, count: Any) -> Any:
    """Return the sum of query[c] * row[c] for `count` float32 values and a row with the codec of its address tag."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        query, row, count = arguments
        return builder.extract_element(_products(builder, [query], [row], count), ir.IntType(32)(0))

    return types.float32(query, row, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def dots_into(typing_context: Any, outs: Any, scale: Any, queries: Any, rows: Any, count: Any) -> Any:
    """out_i[j] = scale * the sum of query_i[c] * row_j[c], as in `dot`, for float32 outputs at a tuple of addresses."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        outs, queries, rows = (_unpack(builder, arguments[i], signature.args[i]) for i in (0, 2, 3))
        sums = _products(builder, queries, rows, arguments[4])
        for i, out in enumerate(outs):
            mask = ir.Constant(ir.VectorType(ir.IntType(32), len(rows)), [*range(i * len(rows), (i + 1) * len(rows))])
            half = builder.shuffle_vector(sums, sums, mask)
            _store(builder, builder.fmul(half, _broadcast(builder, arguments[1], len(rows))), out, _WORD(0))
        return context.get_dummy_value()

    return types.void(outs, types.float32, queries, rows, types.int64), generate


def _fold(builder: Any, lanes: Any, join: Callable[[Any, Any], Any] | None = None) -> Any:
    """Combine the values of a vector: join (by default, add) the upper and the lower half until one value remains."""
    return builder.extract_element(_folded(builder, [lanes], join), ir.IntType(32)(0))


def _fold_all(builder: Any, vectors: list[Any]) -> list[Any]:
    """Fold several vectors."""
    folded = _folded(builder, vectors)
    return [builder.extract_element(folded, ir.IntType(32)(i)) for i in range(len(vectors))]


def _folded(builder: Any, vectors: list[Any], join: Callable[[Any, Any], Any] | None = None) -> Any:
    """Fold several vectors to one lane each. Their number is a power of two, at most WIDTH.

    Two half-folded vectors share a register.
    """
    count, width = len(vectors), WIDTH  # remaining lanes of each vector
    assert count & (count - 1) == 0, f"{count} vectors are not a power of two"
    while width > 1:
        width //= 2
        pairs = list(zip(vectors[::2], vectors[1::2], strict=False)) or [(vectors[0], vectors[0])]
        lanes = count // len(pairs) * width
        halves = ([i // width * 2 * width + i % width + first for i in range(lanes)] for first in (0, width))
        masks = [ir.Constant(ir.VectorType(ir.IntType(32), lanes), half) for half in halves]
        vectors = [(join or builder.fadd)(*(builder.shuffle_vector(*pair, mask) for mask in masks)) for pair in pairs]
    return vectors[0]


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def add_scaled(typing_context: Any, sums: Any, weights: Any, rows: Any, count: Any) -> Any:
    """sums[c] += weight_j * row_j[c], for each j in sequence.

    Args:
        sums: Address of float32 values.
        weights: A tuple of float32 values.
        rows: A tuple of addresses of FP16 rows.
        count: Values of a row.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, count = arguments[0], arguments[3]
        weights, rows = (_unpack(builder, arguments[i], signature.args[i]) for i in (1, 2))
        factors = {_FLOATS: [_broadcast(builder, weight) for weight in weights], _FLOAT: weights}

        def add(index: Any, kind: Any, values: list[Any]) -> None:
            total = _load(builder, sums, index, kind, 4)
            for factor, value in zip(factors[kind], values, strict=True):
                total = _fma(builder, factor, value, total)
            _store(builder, total, sums, index)

        _over_rows(builder, count, rows, add)
        return context.get_dummy_value()

    return types.void(sums, weights, rows, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def add_many(typing_context: Any, sums: Any, weights: Any, rows: Any, tokens: Any, count: Any) -> Any:
    """sums_i[c] += weight_i[t] * row_t[c], for each of `tokens` rows in sequence.

    At most MAX_ACCUMULATORS vectors of sums stay in registers at a time.

    Args:
        sums: A tuple of addresses of sums.
        weights: A tuple of addresses of weights.
        rows: Address of the addresses of the rows.
        tokens: Number of rows.
        count: Values of a row.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, weights = (_unpack(builder, arguments[i], signature.args[i]) for i in (0, 1))
        rows, tokens, count = arguments[2:]

        def add(values: Callable[..., Any], first: Any, parts: list[Any], kind: Any) -> None:
            """Add to the sums of some channels."""
            at = [builder.add(first, part) for part in parts]
            totals = [[cgutils.alloca_once(builder, kind) for _ in at] for _ in sums]
            each = [(own, *one) for own, mine in zip(sums, totals, strict=True) for one in zip(at, mine, strict=True)]
            for own, place, total in each:
                builder.store(_load(builder, own, place, kind, 4), total)
            with cgutils.for_range_slice(builder, _WORD(0), tokens, _WORD(1), _WORD) as (token, _):
                row = _load(builder, rows, token, _WORD, 8)
                row = row if values is _fp16_values else builder.and_(row, _WORD(ADDRESS))
                loaded = [values(builder, row, place, kind) for place in at]
                for weight, mine in zip(weights, totals, strict=True):
                    factor = _load(builder, weight, token, _FLOAT, 4)
                    factor = _broadcast(builder, factor) if kind == _FLOATS else factor
                    for value, total in zip(loaded, mine, strict=True):
                        builder.store(_fma(builder, factor, value, builder.load(total)), total)
            for own, place, total in each:
                _store(builder, builder.load(total), own, place)

        def over(values: Callable[..., Any]) -> None:
            start = _WORD(0)
            for vectors, kind in ((MAX_ACCUMULATORS, _FLOATS), (1, _FLOATS), (1, _FLOAT)):
                step = vectors * (WIDTH if kind == _FLOATS else 1)
                end = builder.and_(count, _WORD(-step))
                with cgutils.for_range_slice(builder, start, end, _WORD(step), _WORD) as (first, _):
                    add(values, first, [_WORD(i * WIDTH) for i in range(vectors)], kind)
                start = end

        _by_kind(builder, _load(builder, rows, _WORD(0), _WORD, 8), over)
        return context.get_dummy_value()

    return types.void(sums, weights, types.uint64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def add_value(typing_context: Any, sums: Any, weight: Any, row: Any, index: Any) -> Any:
    """sum += weight * row[index], for the address of a float32 sum and the address of a row."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at, weight, row, index = arguments

        def add(values: Callable[..., Any]) -> None:
            value = values(builder, builder.and_(row, _WORD(ADDRESS)), index, _FLOAT)
            total = _fma(builder, weight, value, _load(builder, at, _WORD(0), _FLOAT, 4))
            _store(builder, total, at, _WORD(0))

        _by_kind(builder, row, add)
        return context.get_dummy_value()

    return types.void(types.uint64, types.float32, types.uint64, types.int64), generate


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
            spread = (lambda value: _broadcast(builder, value)) if kind == _FLOATS else (lambda value: value)
            some = builder.and_(builder.lshr(_load(builder, codes, index, narrow, 1), spread(shift)), spread(mask))
            total = _fma(builder, spread(weight), builder.uitofp(some, kind), _load(builder, sums, index, kind, 4))
            _store(builder, total, sums, index)

        _over_row(builder, count, add)
        return context.get_dummy_value()

    return types.void(types.uint64, types.float32, types.uint64, types.int64, types.int64, types.int64), generate


def _all(value: float, kind: Any) -> Any:
    """Return a constant; for a vector type, in all lanes."""
    return ir.Constant(kind, [value] * WIDTH if isinstance(kind, ir.VectorType) else value)
