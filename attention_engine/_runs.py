"""Adjacent rows of int8 codes, for several queries in one pass: a code is widened once for all queries.

Each channel has a scale: either q is multiplied by the scale in advance, or the sum is multiplied afterwards. Codes
take part in additions and products with float32 values only. Dot products add lane by lane and fold like `_rows`, for
any number of queries.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from attention_engine._rows import (
    _FLOAT,
    _FLOATS,
    _WORD,
    WIDTH,
    _all,
    _broadcast,
    _fma,
    _fold_all,
    _load,
    _over_row,
    _store,
)

_BYTE, _INDEX = ir.IntType(8), ir.IntType(32)


def _widen(builder: Any, row: Any, index: Any, kind: Any) -> Any:
    """Load the codes of a row as float32."""
    narrow = ir.VectorType(_BYTE, WIDTH) if kind == _FLOATS else _BYTE
    return builder.sitofp(_load(builder, row, index, narrow, 1), kind)


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def dot_codes(typing_context: Any, queries: Any, row: Any, count: Any) -> Any:
    """Return the sums of query_j[i] * row[i] for float32 queries at a tuple of addresses and `count` codes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        queries, row, count = arguments
        vectors = [builder.extract_value(queries, j) for j in range(signature.args[0].count)]
        totals = {kind: [cgutils.alloca_once(builder, kind) for _ in vectors] for kind in (_FLOATS, _FLOAT)}
        for kind in totals:
            for total in totals[kind]:
                builder.store(_all(0.0, kind), total)

        def add(index: Any, kind: Any) -> None:
            values = _widen(builder, row, index, kind)
            for query, total in zip(vectors, totals[kind], strict=True):
                factor = _load(builder, query, index, kind, 4)
                builder.store(_fma(builder, factor, values, builder.load(total)), total)

        _over_row(builder, count, add)
        folded = _fold_all(builder, [builder.load(total) for total in totals[_FLOATS]])
        sums = [builder.fadd(sum_, builder.load(t)) for sum_, t in zip(folded, totals[_FLOAT], strict=True)]
        return context.make_tuple(builder, signature.return_type, sums)

    return types.UniTuple(types.float32, queries.count)(queries, types.uint64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def add_code_run(typing_context: Any, sums: Any, weights: Any, row: Any, rows: Any, scales: Any, count: Any) -> Any:
    """sums_j[i] += scales[i] * the sum over rows of weights_j[row] * row[i], for float32 values at tuples of addresses.

    Args:
        sums: A tuple of addresses of sums, one for each query.
        weights: A tuple of addresses of weights, one for each query.
        row: Address of the first row.
        rows: Number of rows.
        scales: Address of `count` values.
        count: Codes of a row.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, weights, first, rows, scales, count = arguments
        queries = range(signature.args[0].count)
        sums, weights = ([builder.extract_value(each, j) for j in queries] for each in (sums, weights))
        totals = {kind: [cgutils.alloca_once(builder, kind) for _ in queries] for kind in (_FLOATS, _FLOAT)}

        def add(index: Any, kind: Any) -> None:
            for total in totals[kind]:
                builder.store(_all(0.0, kind), total)
            with cgutils.for_range_slice(builder, _WORD(0), rows, _WORD(1), _WORD) as (row, _):
                values = _widen(builder, builder.add(first, builder.mul(row, count)), index, kind)
                for at, total in zip(weights, totals[kind], strict=True):
                    weight = _load(builder, at, row, _FLOAT, 4)
                    factor = _broadcast(builder, weight) if kind == _FLOATS else weight
                    builder.store(_fma(builder, factor, values, builder.load(total)), total)
            scale = _load(builder, scales, index, kind, 4)
            for at, total in zip(sums, totals[kind], strict=True):
                sum_ = _fma(builder, builder.load(total), scale, _load(builder, at, index, kind, 4))
                _store(builder, sum_, at, index)

        _over_row(builder, count, add)
        return context.get_dummy_value()

    words = types.uint64, types.int64, types.uint64, types.int64
    return types.void(sums, weights, *words), generate


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def powers_of(typing_context: Any, powers: Any, exponents: Any, count: Any) -> Any:
    """powers[i] = 2^exponents[i] as float32 for `count` int8 exponents at an address. No power may be subnormal."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        powers, exponents, count = arguments

        def raise_(index: Any, kind: Any) -> None:
            narrow, wide = (ir.VectorType(each, WIDTH) if kind == _FLOATS else each for each in (_BYTE, _INDEX))
            exponent = builder.sext(_load(builder, exponents, index, narrow, 1), wide)
            bits = builder.shl(builder.add(exponent, _all(127, wide)), _all(23, wide))
            _store(builder, builder.bitcast(bits, kind), powers, index)

        _over_row(builder, count, raise_)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.int64), generate
