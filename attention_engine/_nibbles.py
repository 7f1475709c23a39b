"""Sums of table entries that nibbles name: what rows of four planes add to the logits of 32 tokens.

Four queries share a pass. Their entries are 8-bit integers under one unit a page and query, so no order of adding
changes a bit. Where the processor has byte shuffles of 32 (AVX2) a table is a register; elsewhere its bytes are loaded
one by one.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic

from attention_engine._rows import ADDRESS, BF16_ROWS

QUERIES = 4  # of a pass
LARGEST = 253  # of what four planes may add, in units: rounding each adds 2 at most, and 255 is a byte
ROW_BYTES = 16 * QUERIES  # of the tables of one row
_BYTE, _SHORT, _INDEX, _WORD, _FLOAT = *(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.FloatType()
_HALF, _BYTES, _SHORTS = ir.VectorType(_BYTE, 16), ir.VectorType(_BYTE, 32), ir.VectorType(_SHORT, 16)
_FOUR, _ROW, _NUMBERS = ir.VectorType(_FLOAT, 4), ir.VectorType(_FLOAT, 16), ir.VectorType(_INDEX, 16)


def _has_shuffles() -> bool:
    if config.CPU_NAME or config.CPU_FEATURES:
        return "+avx2" in (config.CPU_FEATURES or "")
    return bool(llvm.get_host_cpu_features().get("avx2"))


_SHUFFLES = _has_shuffles()


def _pick(builder: Any, a: Any, lanes: list[int], b: Any = None) -> Any:
    """Lanes of a, and behind its own those of b."""
    order = ir.Constant(ir.VectorType(_INDEX, len(lanes)), lanes)
    return builder.shuffle_vector(a, a if b is None else b, order)


def _spread(builder: Any, value: Any, width: int) -> Any:
    one = builder.insert_element(ir.Constant(ir.VectorType(value.type, width), ir.Undefined), value, _INDEX(0))
    return _pick(builder, one, [0] * width)


def _load(builder: Any, address: Any, kind: Any, offset: int = 0) -> Any:
    place = builder.inttoptr(builder.add(address, _WORD(offset)), kind.as_pointer())
    return builder.load(place, align=1)


def _store(builder: Any, value: Any, address: Any, offset: int = 0) -> None:
    place = builder.inttoptr(builder.add(address, _WORD(offset)), value.type.as_pointer())
    builder.store(value, place, align=1)


def _call(builder: Any, name: str, *arguments: Any) -> Any:
    kind = ir.FunctionType(arguments[0].type, [each.type for each in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def fill_entries(typing_context: Any, entries: Any, page: Any, powers: Any, m: Any, rows: Any) -> Any:
    """Write what each plane of a score page adds to the logits of four queries, FP32; 0 behind the last plane.

    page: address of one of m channels and `rows` rows, which says what scales are of (`_rows`). powers: address of m
    times 32 FP32, the queries times 2^0 to 2^7. Four or eight planes of a channel are written, those that it does not
    have again by the next one: its width decides where that begins. entries: address of 4 x rows + 8 planes.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        entries, place_of_page, powers, m, rows = arguments
        place = cgutils.alloca_once_value(builder, entries)
        brains = builder.icmp_unsigned(">=", place_of_page, _WORD(BF16_ROWS))
        page = builder.and_(place_of_page, _WORD(ADDRESS))
        with cgutils.for_range_slice(builder, _WORD(0), m, _WORD(1), _WORD) as (channel, _):
            bits = _load(builder, builder.add(page, builder.shl(channel, _WORD(1))), _SHORT)
            brain = builder.bitcast(builder.shl(builder.zext(bits, _INDEX), _INDEX(16)), _FLOAT)
            half = builder.fpext(builder.bitcast(bits, ir.HalfType()), _FLOAT)
            scale = _spread(builder, builder.select(brains, brain, half), 16)
            power, at = builder.add(powers, builder.shl(channel, _WORD(7))), builder.load(place)
            width = _load(builder, builder.add(page, builder.add(builder.shl(m, _WORD(2)), channel)), _BYTE)
            _store(builder, builder.fmul(_load(builder, power, _ROW), scale), at)
            with builder.if_then(builder.icmp_unsigned(">", width, _BYTE(4)), likely=False):
                _store(builder, builder.fmul(_load(builder, power, _ROW, 64), scale), at, 64)
            builder.store(builder.add(at, builder.shl(builder.zext(width, _WORD), _WORD(4))), place)
        end = builder.add(entries, builder.shl(rows, _WORD(6)))
        with cgutils.for_range_slice(builder, builder.load(place), end, _WORD(16), _WORD) as (at, _):
            _store(builder, ir.Constant(_FOUR, [0.0] * 4), at)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def fill_tables(typing_context: Any, tables: Any, entries: Any, rows: Any) -> Any:
    """Write the tables of `rows` rows; returns the unit of each query's entries, and the sum that stands for 0.

    entries: address of FP32, of each row four planes of four queries. tables: address of ROW_BYTES a row, 16 of each
    query: of each nibble, what the planes of its bits add, over the least that any bits of the row do.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        tables, entries, rows = arguments
        widest = cgutils.alloca_once_value(builder, ir.Constant(_FOUR, [0.0] * 4))
        least = cgutils.alloca_once_value(builder, ir.Constant(_NUMBERS, [0] * 16))
        with cgutils.for_range_slice(builder, _WORD(0), rows, _WORD(1), _WORD) as (row, _):
            some = _call(
                builder, "llvm.fabs.v16f32", _load(builder, builder.add(entries, builder.shl(row, _WORD(6))), _ROW)
            )
            pairs = builder.fadd(_pick(builder, some, [*range(8)]), _pick(builder, some, [*range(8, 16)]))
            total = builder.fadd(_pick(builder, pairs, [*range(4)]), _pick(builder, pairs, [*range(4, 8)]))
            known = builder.load(widest)
            builder.store(builder.select(builder.fcmp_ordered(">", total, known), total, known), widest)
        known, full = builder.load(widest), ir.Constant(_FOUR, [float(LARGEST)] * 4)
        positive = builder.fcmp_ordered(">", known, ir.Constant(_FOUR, [0.0] * 4))
        inverse = builder.select(positive, builder.fdiv(full, known), ir.Constant(_FOUR, [0.0] * 4))
        inverse = _pick(builder, inverse, [*range(4)] * 4)
        with cgutils.for_range_slice(builder, _WORD(0), rows, _WORD(1), _WORD) as (row, _):
            at = builder.shl(row, _WORD(6))
            scaled = builder.fmul(_load(builder, builder.add(entries, at), _ROW), inverse)
            units = builder.fptosi(_call(builder, "llvm.rint.v16f32", scaled), _NUMBERS)
            none = ir.Constant(_NUMBERS, [0] * 16)
            up = builder.select(builder.icmp_signed(">", units, none), units, none)
            down = builder.sub(up, units)
            builder.store(builder.add(builder.load(least), down), least)
            _fill_row(builder, builder.add(tables, at), builder.trunc(up, _HALF), builder.trunc(down, _HALF))
        zeros = builder.load(least)
        zeros = builder.add(_pick(builder, zeros, [*range(8)]), _pick(builder, zeros, [*range(8, 16)]))
        zeros = builder.add(_pick(builder, zeros, [*range(4)]), _pick(builder, zeros, [*range(4, 8)]))
        zeros, unit = builder.sitofp(zeros, _FOUR), builder.fdiv(known, full)
        each = [builder.extract_element(four, _INDEX(i)) for four in (unit, zeros) for i in range(QUERIES)]
        pair = [context.make_tuple(builder, types.UniTuple(types.float32, 4), part) for part in (each[:4], each[4:])]
        return context.make_tuple(builder, signature.return_type, pair)

    four = types.UniTuple(types.float32, 4)
    return types.UniTuple(four, 2)(types.uint64, types.uint64, types.int64), generate


def _fill_row(builder: Any, tables: Any, up: Any, down: Any) -> None:
    """Tables of a row from what a plane adds where its bit is 1 and where it is 0: bytes, plane by plane of 4 queries.

    First the four sums of planes 0 and 1 and those of 2 and 3, then for each nibble one of each.
    """
    halves = []
    for plane in (0, 2):
        a, b = ([*range(first, first + 4)] for first in (4 * plane, 4 * plane + 4))
        set_a, set_b = [16 + lane for lane in a], [16 + lane for lane in b]
        first = _pick(builder, down, a + set_a, up)
        low, high = (builder.add(first, _pick(builder, down, second * 2, up)) for second in (b, set_b))
        halves.append(_pick(builder, low, [*range(8)] + [8 + lane for lane in range(8)], high))
    for query in range(0, QUERIES, 2):
        lanes = [(query + j, name) for j in range(2) for name in range(16)]
        parts = [
            _pick(builder, half, [4 * (name >> shift & 3) + each for each, name in lanes])
            for half, shift in zip(halves, (0, 2), strict=True)
        ]
        _store(builder, builder.add(*parts), tables, 16 * query)


def _look_up(builder: Any, table: Any, names: Any) -> Any:
    """Of 16 bytes at an address those that 32 nibbles name."""
    if _SHUFFLES:
        both = _pick(builder, _load(builder, table, _HALF), [*range(16)] * 2)
        kind = ir.FunctionType(_BYTES, [_BYTES, _BYTES])
        shuffle = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.pshuf.b")
        return builder.call(shuffle, [both, names])
    found = ir.Constant(_BYTES, ir.Undefined)
    for lane in range(32):
        name = builder.zext(builder.extract_element(names, _INDEX(lane)), _WORD)
        byte = builder.load(builder.inttoptr(builder.add(table, name), _BYTE.as_pointer()))
        found = builder.insert_element(found, byte, _INDEX(lane))
    return found


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def add_entries(typing_context: Any, out: Any, tables: Any, codes: Any, rows: Any, stride: Any, numbers: Any) -> Any:
    """out_j[t] += offset + unit * the sum over rows of the entry of table j of that row that token t's nibble names.

    out: a tuple of addresses of 32 FP32. tables: address of those of the first query among them. numbers: (units,
    offsets), tuples. codes: address of 16 bytes of the first row, token t in the low half of byte t or in the high half
    of byte t - 16; those of the next row are `stride` bytes on.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        out, tables, codes, rows, stride, numbers = arguments
        queries = range(signature.args[0].count)
        zero, eight = ir.Constant(_SHORTS, [0] * 16), ir.Constant(_SHORTS, [8] * 16)
        totals = [[cgutils.alloca_once_value(builder, zero) for _ in range(2)] for _ in queries]
        for total in (each for pair in totals for each in pair):
            builder.store(zero, total)
        with cgutils.for_range_slice(builder, _WORD(0), rows, _WORD(1), _WORD) as (row, _):
            low = _load(builder, builder.add(codes, builder.mul(row, stride)), _HALF)
            high = builder.lshr(low, ir.Constant(_HALF, [4] * 16))
            names = builder.and_(_pick(builder, low, [*range(32)], high), ir.Constant(_BYTES, [15] * 32))
            table = builder.add(tables, builder.mul(row, _WORD(ROW_BYTES)))
            for query, (both, odd) in enumerate(totals):  # an even byte and 256 times the odd one behind it; odd bytes
                found = builder.bitcast(_look_up(builder, builder.add(table, _WORD(16 * query)), names), _SHORTS)
                builder.store(builder.add(builder.load(both), found), both)
                builder.store(builder.add(builder.load(odd), builder.lshr(found, eight)), odd)
        units, offsets = (builder.extract_value(numbers, part) for part in range(2))
        for query in queries:
            both, odd = (builder.load(total) for total in totals[query])
            even = builder.sub(both, builder.shl(odd, eight))
            lanes = [16 * (token % 2) + token // 2 for token in range(32)]
            unit, offset = (builder.extract_value(part, query) for part in (units, offsets))
            place = builder.extract_value(out, query)
            for first in (0, 16):
                sums = builder.uitofp(_pick(builder, even, lanes[first : first + 16], odd), _ROW)
                logits = _call(
                    builder, "llvm.fma.v16f32", sums, _spread(builder, unit, 16), _spread(builder, offset, 16)
                )
                _store(builder, builder.fadd(_load(builder, place, _ROW, 4 * first), logits), place, 4 * first)
        return context.get_dummy_value()

    return types.void(out, types.uint64, types.uint64, types.int64, types.int64, numbers), generate
