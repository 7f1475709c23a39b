"""Sums of values of few bits (`csd_spec.progressive`): weights as integers, and their sums with codes of V."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from attention_engine._dot4 import add_products, codes_of, factors_at
from attention_engine._lanes import (
    BYTE,
    FLOAT,
    FLOATS,
    INDEX,
    SUMS,
    WORD,
    all_of,
    at_offset,
    folded,
    halves,
    largest_lane,
    load,
    load_some,
    rounded,
    spread,
    store,
)
from attention_engine._rows import _ask
from csd_spec.progressive import LANES, LINE


def _value_sums(bits: int) -> Any:
    """Sums of values of `bits` bits: see `sum_values2`."""

    def typed(typing_context: Any, out: Any, weights: Any, lines: Any, ahead: Any, count: Any, blocks: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            out, weights, lines, ahead, count, blocks = arguments
            queries, quads, stride = range(signature.args[0].count), 8 // bits, builder.shl(count, WORD(6))

            def add(line: Any, some: int) -> None:
                totals = [[cgutils.alloca_once_value(builder, all_of(SUMS, 0)) for _ in queries] for _ in range(some)]
                for total in (each for mine in totals for each in mine):
                    builder.store(all_of(SUMS, 0), total)
                first = builder.add(lines, builder.shl(line, WORD(6)))
                with cgutils.for_range_slice(builder, WORD(0), blocks, WORD(1), WORD) as (block, _):
                    mine = builder.add(first, builder.mul(block, stride))
                    places = [at_offset(builder, mine, LINE * i) for i in range(some)]
                    read, place = [load(builder, at, SUMS) for at in places], builder.mul(block, WORD(4 * quads))
                    for at in places:
                        _ask(builder, builder.add(at, ahead))
                    for quad in range(quads):
                        codes = [codes_of(builder, each, bits * quad, bits) for each in read]
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
lines. ahead: how far behind a line lies what is asked for meanwhile.
Two lines go together, so that no sum waits for itself.
"""


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def round_weights(typing_context: Any, weights: Any, sizes: Any, count: Any, blocks: Any, out: Any) -> Any:
    """Write multiples, 0 to 127, of a unit as int8 for weights x sizes; returns units, the sums of the multiples, and
    the sums of the squares of the products, a tuple of each.

    weights: addresses of `count` FP32, one of each query, a tuple. sizes: address of as many. out: addresses of 16
    bytes a block; behind `count` are zeros. What rounding takes from a token goes to the 16th behind it.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, sizes, count, blocks, out = arguments
        queries = range(signature.args[0].count)

        def cells(kind: Any) -> list[Any]:
            made = [cgutils.alloca_once(builder, kind) for _ in queries]
            for cell in made:
                builder.store(all_of(kind, 0), cell)
            return made

        most, squares, carries, totals = cells(FLOATS), cells(FLOATS), cells(FLOATS), cells(SUMS)

        def products(block: Any) -> list[Any]:
            left, place = builder.sub(count, builder.shl(block, WORD(4))), builder.shl(block, WORD(6))
            size = load(builder, builder.add(sizes, place), FLOATS)
            rows = (builder.add(builder.extract_value(weights, j), place) for j in queries)
            return [builder.fmul(load_some(builder, row, left), size) for row in rows]

        with cgutils.for_range_slice(builder, WORD(0), blocks, WORD(1), WORD) as (block, _):
            for j, value in enumerate(products(block)):
                known = builder.load(most[j])
                builder.store(builder.select(builder.fcmp_ordered(">", value, known), value, known), most[j])
                builder.store(builder.fadd(builder.load(squares[j]), builder.fmul(value, value)), squares[j])
        largest = [largest_lane(builder, builder.load(cell)) for cell in most]
        inverses = []
        for each in largest:
            some = builder.fcmp_ordered(">", each, FLOAT(0))
            inverses.append(spread(builder, builder.select(some, builder.fdiv(FLOAT(127), each), FLOAT(0))))
        with cgutils.for_range_slice(builder, WORD(0), blocks, WORD(1), WORD) as (block, _):
            for j, product in enumerate(products(block)):
                value = builder.fadd(builder.fmul(product, inverses[j]), builder.load(carries[j]))
                near, top = rounded(builder, value), all_of(FLOATS, 127.0)
                near = builder.select(builder.fcmp_ordered(">", near, top), top, near)
                builder.store(builder.fsub(value, near), carries[j])
                multiple = builder.fptosi(near, SUMS)
                builder.store(builder.add(builder.load(totals[j]), multiple), totals[j])
                codes = builder.trunc(multiple, ir.VectorType(BYTE, LANES))
                store(builder, codes, builder.add(builder.extract_value(out, j), builder.shl(block, WORD(4))))
        sums = []
        for cell in totals:
            total = builder.load(cell)
            while total.type.count > 1:
                total = builder.add(*halves(builder, total))
            sums.append(builder.sitofp(builder.extract_element(total, INDEX(0)), FLOAT))
        units = [builder.fdiv(each, FLOAT(127)) for each in largest]
        added = [folded(builder, builder.load(cell)) for cell in squares]
        row = types.UniTuple(types.float32, len(queries))
        parts = [context.make_tuple(builder, row, part) for part in (units, sums, added)]
        return context.make_tuple(builder, signature.return_type, parts)

    row = types.UniTuple(types.float32, weights.count)
    return types.UniTuple(row, 3)(weights, types.uint64, types.int64, types.int64, out), generate
