"""Scores from lines of 2-bit digits (`csd_spec.progressive`): page factors for four queries, and their sums."""

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
    LANE_BYTES,
    SUMS,
    WORD,
    all_of,
    at_offset,
    call,
    clamped,
    fma,
    folded,
    lanes_below,
    load,
    nearest,
    pick,
    rounded,
    spread,
    store,
    widened,
)
from attention_engine._rows import _prefetch_line
from csd_spec.progressive import LANES, LINE

QUERIES = 4  # of a pass
OFFSETS = 2.0**20  # products of q and least values are multiples of its inverse
_FOUR = ir.VectorType(FLOAT, QUERIES)


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def read_header(typing_context: Any, scales: Any, page: Any, bf16: Any, queries: Any, m: Any) -> Any:
    """Write the scales of a score page. Return its offsets and the variances of its quantization errors.

    Both results are tuples of four float32 values, one for each query. Products of q and a minimum value are clamped to
    2^50 multiples of 2^-20.

    Args:
        scales: Address of float32 values; their number is rounded up to a multiple of 16.
        page: Address of a page of m channels.
        bf16: Whether the header of the page is in BF16.
        queries: Address of four rows of float32 values, padded with zeros after m values.
        m: Channels of the page.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scales, page, bf16, queries, m = arguments
        longs = ir.VectorType(WORD, LANES)
        offsets, variances = (
            [cgutils.alloca_once_value(builder, all_of(kind, 0)) for _ in range(QUERIES)] for kind in (longs, FLOATS)
        )
        for cell in (*offsets, *variances):
            builder.store(all_of(cell.type.pointee, 0), cell)
        row = builder.and_(builder.add(builder.shl(m, WORD(2)), WORD(LINE - 1)), WORD(-LINE))
        with cgutils.for_range_slice(builder, WORD(0), m, WORD(LANES), WORD) as (channel, _):
            live = lanes_below(builder, builder.sub(m, channel))
            first = builder.add(page, builder.shl(channel, WORD(1)))
            behind = builder.add(first, builder.shl(m, WORD(1)))
            scale, least = (
                builder.select(live, widened(builder, at, bf16), all_of(FLOATS, 0.0)) for at in (first, behind)
            )
            widths = builder.add(builder.add(page, builder.shl(m, WORD(2))), channel)
            none = builder.icmp_unsigned("==", load(builder, widths, LANE_BYTES), all_of(LANE_BYTES, 0))
            share = builder.select(none, all_of(FLOATS, 1 / 32), all_of(FLOATS, 1 / 12))
            place = builder.shl(channel, WORD(2))
            store(builder, scale, builder.add(scales, place))
            for j in range(QUERIES):
                q = load(builder, builder.add(builder.add(queries, builder.mul(row, WORD(j))), place), FLOATS)
                step = builder.fmul(q, scale)
                square = fma(builder, builder.fmul(step, share), step, builder.load(variances[j]))
                builder.store(square, variances[j])
                part = builder.fmul(builder.fmul(q, least), all_of(FLOATS, OFFSETS))
                part = builder.fptosi(rounded(builder, clamped(builder, part, -(2.0**50), 2.0**50)), longs)
                builder.store(builder.add(builder.load(offsets[j]), part), offsets[j])
        sums = [builder.sitofp(folded(builder, builder.load(cell)), FLOAT) for cell in offsets]
        means = [builder.fmul(total, FLOAT(1 / OFFSETS)) for total in sums]
        missed = [folded(builder, builder.load(cell)) for cell in variances]
        four = types.UniTuple(types.float32, QUERIES)
        parts = [context.make_tuple(builder, four, part) for part in (means, missed)]
        return context.make_tuple(builder, signature.return_type, parts)

    words = types.uint64, types.uint64, types.boolean, types.uint64, types.int64
    return types.UniTuple(types.UniTuple(types.float32, QUERIES), 2)(*words), generate


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def fill_factors(
    typing_context: Any, factors: Any, entries: Any, scales: Any, page: Any, powers: Any, m: Any, D: Any
) -> Any:
    """Write the int8 factors of the D digits of a score page for four queries.

    Args:
        factors: Address of 16 bytes for every four digits: four digits of each query.
        entries: Address of scratch memory for 4 D + 16 float32 values.
        scales: Scales from `read_header`.
        page: Address of a page of m channels.
        powers: Address of 16 float32 values for each channel: the queries, and the queries times 4, 16 and 64.

    Returns:
        The units of the factors and the variances of their rounding errors, two tuples of four float32 values.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        factors, entries, scales, page, powers, m, digits = arguments
        place, widths = cgutils.alloca_once_value(builder, entries), builder.add(page, builder.shl(m, WORD(2)))
        builder.store(entries, place)
        with cgutils.for_range_slice(builder, WORD(0), m, WORD(1), WORD) as (channel, _):
            width = load(builder, builder.add(widths, channel), BYTE)
            power = load(builder, builder.add(powers, builder.shl(channel, WORD(6))), FLOATS)
            scale = load(builder, builder.add(scales, builder.shl(channel, WORD(2))), FLOAT)
            at = builder.load(place)
            store(builder, builder.fmul(power, spread(builder, scale)), at)
            builder.store(builder.add(at, builder.shl(builder.zext(width, WORD), WORD(4))), place)
        end = builder.add(entries, builder.shl(digits, WORD(4)))
        with cgutils.for_range_slice(builder, builder.load(place), end, WORD(16), WORD) as (at, _):
            store(builder, all_of(_FOUR, 0.0), at)
        units, inverse = _units(builder, entries, digits)
        _store_factors(builder, factors, entries, digits, inverse)
        used = builder.lshr(builder.sub(builder.load(place), entries), WORD(4))
        used = builder.fmul(builder.uitofp(used, FLOAT), FLOAT(3.5 / 12))
        rounding = builder.fmul(builder.fmul(units, units), spread(builder, used, QUERIES))
        four = types.UniTuple(types.float32, QUERIES)
        parts = [
            context.make_tuple(builder, four, [builder.extract_element(each, INDEX(j)) for j in range(QUERIES)])
            for each in (units, rounding)
        ]
        return context.make_tuple(builder, signature.return_type, parts)

    words = types.uint64, types.uint64, types.uint64, types.uint64, types.uint64, types.int64, types.int64
    return types.UniTuple(types.UniTuple(types.float32, QUERIES), 2)(*words), generate


def _store_factors(builder: Any, factors: Any, entries: Any, digits: Any, inverse: Any) -> None:
    """Store the entries as int8 multiples of the unit of their query; four digits of each query are adjacent."""
    with cgutils.for_range_slice(builder, WORD(0), digits, WORD(4), WORD) as (digit, _):
        entry = load(builder, builder.add(entries, builder.shl(digit, WORD(4))), FLOATS)
        codes, _ = nearest(builder, clamped(builder, builder.fmul(entry, inverse), -127.0, 127.0))
        by_query = pick(builder, codes, [4 * place + query for query in range(4) for place in range(4)])
        store(builder, by_query, builder.add(factors, builder.shl(digit, WORD(2))))


def _units(builder: Any, entries: Any, digits: Any) -> tuple[Any, Any]:
    """Return a power of two for each of four queries that scales its largest entry to 64..127, and 16 inverses."""
    most = cgutils.alloca_once_value(builder, all_of(FLOATS, 0.0))
    builder.store(all_of(FLOATS, 0.0), most)
    with cgutils.for_range_slice(builder, WORD(0), digits, WORD(4), WORD) as (digit, _):
        entry = load(builder, builder.add(entries, builder.shl(digit, WORD(4))), FLOATS)
        size, before = call(builder, "llvm.fabs.v16f32", FLOATS, entry), builder.load(most)
        builder.store(builder.select(builder.fcmp_ordered(">", size, before), size, before), most)
    largest = builder.load(most)
    while largest.type.count > QUERIES:
        half = largest.type.count // 2
        low, high = (pick(builder, largest, [*range(first, first + half)]) for first in (0, half))
        largest = builder.select(builder.fcmp_ordered(">", low, high), low, high)
    words = ir.VectorType(INDEX, QUERIES)
    exponent = builder.sub(builder.lshr(builder.bitcast(largest, words), all_of(words, 23)), all_of(words, 127 + 6))
    for order, bound in (("<", -120), (">", 120)):
        limit = all_of(words, bound)
        exponent = builder.select(builder.icmp_signed(order, exponent, limit), limit, exponent)
    units, inverse = (
        builder.bitcast(builder.shl(power, all_of(words, 23)), _FOUR)
        for power in (builder.add(all_of(words, 127), exponent), builder.sub(all_of(words, 127), exponent))
    )
    return units, pick(builder, inverse, [*range(QUERIES)] * 4)


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def add_scores(
    typing_context: Any, out: Any, fresh: Any, factors: Any, lines: Any, prefetch_offset: Any, shape: Any, numbers: Any
) -> Any:
    """out_j[t] += offset_j + unit_j x the sum over digits of factor x digit, for blocks of 16 tokens; = if `fresh`.

    The loop handles two blocks at a time, so that additions do not wait for each other.

    Args:
        out: A tuple of addresses of 16 float32 values for each block, one for each query.
        fresh: Whether `out` has no values yet.
        factors: Address of the factors of the first of these queries, from `fill_factors`.
        lines: Address of the lines of the first block.
        prefetch_offset: Distance in bytes from a line to the line to prefetch.
        shape: Lines of a block, and the number of blocks.
        numbers: (units, offsets), tuples.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        out, fresh, factors, lines, prefetch_offset, shape, numbers = arguments
        count, blocks = (builder.extract_value(shape, i) for i in (0, 1))
        queries, size = range(signature.args[0].count), builder.shl(count, WORD(6))

        def score(block: Any, some: int) -> None:
            totals = [[cgutils.alloca_once_value(builder, all_of(SUMS, 0)) for _ in queries] for _ in range(some)]
            for total in (each for mine in totals for each in mine):
                builder.store(all_of(SUMS, 0), total)
            first = builder.add(lines, builder.mul(block, size))
            with cgutils.for_range_slice(builder, WORD(0), size, WORD(LINE), WORD) as (place, _):
                mine = [builder.add(builder.add(first, place), builder.mul(size, WORD(i))) for i in range(some)]
                read = [load(builder, at, SUMS) for at in mine]
                for at in mine:
                    _prefetch_line(builder, builder.add(at, prefetch_offset))
                for part in range(4):
                    codes = [codes_of(builder, line, 2 * part, 2) for line in read]
                    for j in queries:
                        factor = factors_at(builder, at_offset(builder, builder.add(factors, place), 16 * part + 4 * j))
                        for total, code in zip(totals, codes, strict=True):
                            builder.store(add_products(builder, builder.load(total[j]), code, factor), total[j])
            for j in queries:
                unit, offset = (
                    spread(builder, builder.extract_value(builder.extract_value(numbers, i), j)) for i in (0, 1)
                )
                for i, total in enumerate(totals):
                    sums = builder.sitofp(builder.load(total[j]), FLOATS)
                    logits = fma(builder, sums, unit, offset)
                    at = at_offset(
                        builder, builder.add(builder.extract_value(out, j), builder.shl(block, WORD(6))), LINE * i
                    )
                    old = builder.select(fresh, all_of(FLOATS, 0.0), load(builder, at, FLOATS))
                    store(builder, builder.fadd(old, logits), at)

        pairs = builder.and_(blocks, WORD(-2))
        with cgutils.for_range_slice(builder, WORD(0), pairs, WORD(2), WORD) as (block, _):
            score(block, 2)
        with builder.if_then(builder.icmp_unsigned("<", pairs, blocks)):
            score(pairs, 1)
        return context.get_dummy_value()

    words = types.boolean, types.uint64, types.uint64, types.uint64, shape
    return types.void(out, *words, numbers), generate
