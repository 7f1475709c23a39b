"""Sums of low-bit values (`csd_spec.progressive`): integer weights, and the sums of weights times codes of V."""

from __future__ import annotations

import itertools
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from attention_engine._dot4 import add_products, codes_of, factors_at
from attention_engine._lanes import (
    FLOAT,
    FLOATS,
    SUMS,
    WORD,
    all_of,
    at_offset,
    fma,
    folded,
    largest_lane,
    load,
    load_some,
    nearest,
    spread,
    store,
)
from attention_engine._rows import _prefetch_line
from csd_spec.progressive import LINE

LEAST = 2.0**-100  # smaller weights x sizes of a page count as 0: the quotient 127 / value exceeds float32


def _value_sums(bits: int) -> Any:
    """Return the function that sums values of `bits` bits; see `sum_values2`."""

    def typed(
        typing_context: Any, out: Any, weights: Any, lines: Any, prefetch_offset: Any, count: Any, blocks: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            out, weights, lines, prefetch_offset, count, blocks = arguments
            queries, quads, stride = range(signature.args[0].count), 8 // bits, builder.shl(count, WORD(6))

            def add(line: Any, number: int) -> None:
                totals = [[cgutils.alloca_once_value(builder, all_of(SUMS, 0)) for _ in queries] for _ in range(number)]
                for total in itertools.chain(*totals):
                    builder.store(all_of(SUMS, 0), total)
                first = builder.add(lines, builder.shl(line, WORD(6)))
                with cgutils.for_range_slice(builder, WORD(0), blocks, WORD(1), WORD) as (block, _):
                    address = builder.add(first, builder.mul(block, stride))
                    places = [at_offset(builder, address, LINE * i) for i in range(number)]
                    read, place = [load(builder, at, SUMS) for at in places], builder.mul(block, WORD(4 * quads))
                    for at in places:
                        _prefetch_line(builder, builder.add(at, prefetch_offset))
                    for quad in range(quads):
                        codes = [codes_of(builder, word, bits * quad, bits) for word in read]
                        for j in queries:
                            at = at_offset(builder, builder.add(builder.extract_value(weights, j), place), 4 * quad)
                            factor = factors_at(builder, at)
                            for total, code in zip(totals, codes, strict=True):
                                builder.store(add_products(builder, builder.load(total[j]), code, factor), total[j])
                for i, total in enumerate(totals):
                    for j in queries:
                        at = at_offset(
                            builder, builder.add(builder.extract_value(out, j), builder.shl(line, WORD(6))), LINE * i
                        )
                        store(builder, builder.load(total[j]), at)

            pairs = builder.and_(count, WORD(-2))
            with cgutils.for_range_slice(builder, WORD(0), pairs, WORD(2), WORD) as (line, _):
                add(line, 2)
            with builder.if_then(builder.icmp_unsigned("<", pairs, count)):
                add(pairs, 1)
            return context.get_dummy_value()

        return types.void(out, weights, types.uint64, types.uint64, types.int64, types.int64), generate

    return intrinsic(typed)


sum_values2, sum_values4 = _value_sums(2), _value_sums(4)
"""Store at `out`, a tuple of addresses of 16 int32 for each of `count` lines, the sums over tokens of weight x code of
each line's 16 channels, query by query.

weights: a tuple of addresses of int8, 0 to 127, one for each token. lines: address of the first of `blocks` blocks of
lines. prefetch_offset: how far behind a line lies what is asked for meanwhile.
Two lines go together, so that no sum waits for itself.
"""


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def round_weights(typing_context: Any, weights: Any, sizes: Any, count: Any, blocks: Any, out: Any) -> Any:
    """Write weights x sizes as int8 multiples (0 to 127) of a unit.

    The rounding error of a token is carried over to the token 16 places later.

    Args:
        weights: A tuple of addresses of `count` float32 values, one for each query.
        sizes: Address of `count` float32 values.
        count: Number of tokens.
        blocks: Number of blocks of 16 tokens.
        out: A tuple of addresses of 16 bytes for each block; bytes after `count` are zero.

    Returns:
        Three tuples: the units, the sums of the multiples, and the sums of the squares of the products.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, sizes, count, blocks, out = arguments
        queries = range(signature.args[0].count)

        def cells() -> list[Any]:
            vectors = [cgutils.alloca_once(builder, FLOATS) for _ in queries]
            for cell in vectors:
                builder.store(all_of(FLOATS, 0.0), cell)
            return vectors

        most, squares, carries, totals = (cells() for _ in range(4))

        def products(block: Any) -> list[Any]:
            left, place = builder.sub(count, builder.shl(block, WORD(4))), builder.shl(block, WORD(6))
            size = load(builder, builder.add(sizes, place), FLOATS)
            rows = (load_some(builder, builder.add(builder.extract_value(weights, j), place), left) for j in queries)
            return [builder.fmul(row, size) for row in rows]

        with cgutils.for_range_slice(builder, WORD(0), blocks, WORD(1), WORD) as (block, _):
            for j, value in enumerate(products(block)):
                before = builder.load(most[j])
                builder.store(builder.select(builder.fcmp_ordered(">", value, before), value, before), most[j])
                builder.store(fma(builder, value, value, builder.load(squares[j])), squares[j])
        largest = [largest_lane(builder, builder.load(cell)) for cell in most]
        inverses = []
        for each in largest:
            some = builder.fcmp_ordered(">", each, FLOAT(LEAST))
            inverses.append(spread(builder, builder.select(some, builder.fdiv(FLOAT(127), each), FLOAT(0))))
        with cgutils.for_range_slice(builder, WORD(0), blocks, WORD(1), WORD) as (block, _):
            for j, product in enumerate(products(block)):
                value, top = fma(builder, product, inverses[j], builder.load(carries[j])), all_of(FLOATS, 127.0)
                below = builder.select(builder.fcmp_ordered(">", value, top), top, value)
                codes, near = nearest(builder, below)
                builder.store(builder.fsub(value, near), carries[j])
                builder.store(builder.fadd(builder.load(totals[j]), near), totals[j])
                store(builder, codes, builder.add(builder.extract_value(out, j), builder.shl(block, WORD(4))))
        units = [builder.fdiv(each, FLOAT(127)) for each in largest]
        added = ([folded(builder, builder.load(cell)) for cell in mine] for mine in (totals, squares))
        row = types.UniTuple(types.float32, len(queries))
        parts = [context.make_tuple(builder, row, part) for part in (units, *added)]
        return context.make_tuple(builder, signature.return_type, parts)

    row = types.UniTuple(types.float32, weights.count)
    return types.UniTuple(row, 3)(weights, types.uint64, types.int64, types.int64, out), generate


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def add_values(
    typing_context: Any, out: Any, rows: Any, sums: Any, rests: Any, lines: Any, middle: Any, numbers: Any
) -> Any:
    """out_j[c] += (2 sum_j[c] - middle x total_j) x unit_j / 2 + mass_j x rest[c], for 16 channels a line.

    It also adds square_j to squares_j.

    Args:
        out: A tuple of addresses of float32 sums, one for each query.
        rows: Addresses of the masses and of the squares.
        sums: A tuple of addresses of int32 sums, one for each query.
        rests: Address of float32 values.
        lines: Number of lines.
        middle: The largest code.
        numbers: (units, totals, squares) from `round_weights`.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        out, rows, sums, rests, lines, middle, numbers = arguments
        masses, squares = (builder.extract_value(rows, i) for i in range(2))
        for j in range(signature.args[0].count):
            unit, total, square = (builder.extract_value(builder.extract_value(numbers, i), j) for i in range(3))
            mass, at = load(builder, at_offset(builder, masses, 4 * j), FLOAT), at_offset(builder, squares, 4 * j)
            store(builder, builder.fadd(load(builder, at, FLOAT), square), at)
            half, less = spread(builder, builder.fmul(unit, FLOAT(0.5))), spread(builder, builder.fmul(middle, total))
            to, found = builder.extract_value(out, j), builder.extract_value(sums, j)
            with cgutils.for_range_slice(builder, WORD(0), lines, WORD(1), WORD) as (line, _):
                place = builder.shl(line, WORD(6))
                twice = builder.fmul(
                    builder.sitofp(load(builder, builder.add(found, place), SUMS), FLOATS), all_of(FLOATS, 2.0)
                )
                value = builder.fmul(builder.fsub(twice, less), half)
                rest = builder.fmul(spread(builder, mass), load(builder, builder.add(rests, place), FLOATS))
                old = load(builder, builder.add(to, place), FLOATS)
                store(builder, builder.fadd(old, builder.fadd(value, rest)), builder.add(to, place))
        return context.get_dummy_value()

    return types.void(out, rows, sums, types.uint64, types.int64, types.float32, numbers), generate
