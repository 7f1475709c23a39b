"""Sums of table entries that nibbles name: what rows of four planes add to 32 tokens.

Entries are 16-bit integers, so no order of adding changes a bit. Where the processor has byte shuffles of 32 (AVX2) a
table is two registers, its low bytes and its high ones; elsewhere its bytes are loaded one by one.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic

TABLE_BYTES = 32  # 16 low bytes, then 16 high ones
_BYTE, _SHORT, _INDEX, _WORD = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_HALF, _BYTES, _SHORTS = ir.VectorType(_BYTE, 16), ir.VectorType(_BYTE, 32), ir.VectorType(_SHORT, 16)
_ZERO = ir.Constant(_SHORTS, [0] * 16)


def _has_shuffles() -> bool:
    if config.CPU_NAME or config.CPU_FEATURES:
        return "+avx2" in (config.CPU_FEATURES or "")
    return bool(llvm.get_host_cpu_features().get("avx2"))


_SHUFFLES = _has_shuffles()


def _order(lanes: list[int]) -> Any:
    return ir.Constant(ir.VectorType(_INDEX, len(lanes)), lanes)


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _look_up(builder: Any, table: Any, names: Any) -> Any:
    """Of 16 bytes at an address those that 32 nibbles name."""
    if _SHUFFLES:
        half = builder.load(_pointer(builder, table, _HALF), align=1)
        both = builder.shuffle_vector(half, half, _order([*range(16), *range(16)]))
        kind = ir.FunctionType(_BYTES, [_BYTES, _BYTES])
        shuffle = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.pshuf.b")
        return builder.call(shuffle, [both, names])
    found = ir.Constant(_BYTES, ir.Undefined)
    for lane in range(32):
        name = builder.zext(builder.extract_element(names, _INDEX(lane)), _WORD)
        byte = builder.load(_pointer(builder, builder.add(table, name), _BYTE))
        found = builder.insert_element(found, byte, _INDEX(lane))
    return found


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def sum_entries(typing_context: Any, sums: Any, tables: Any, codes: Any, rows: Any, stride: Any) -> Any:
    """sums_j[t] = the sum over rows of the entry of table j of that row that token t's nibble names, t < 32.

    sums, tables: tuples of addresses, of 32 int16 and of `rows` tables that follow each other. codes: address of 16
    bytes of the first row, token t in the low half of byte t or in the high half of byte t - 16; those of the next row
    are `stride` bytes on.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, tables, codes, rows, stride = arguments
        queries = range(signature.args[0].count)
        sums, tables = ([builder.extract_value(each, query) for query in queries] for each in (sums, tables))
        totals = [[cgutils.alloca_once_value(builder, _ZERO) for _ in range(2)] for _ in queries]
        for total in (each for pair in totals for each in pair):
            builder.store(_ZERO, total)
        with cgutils.for_range_slice(builder, _WORD(0), rows, _WORD(1), _WORD) as (row, _):
            place = builder.add(codes, builder.mul(row, stride))
            low = builder.load(_pointer(builder, place, _HALF), align=1)
            high = builder.lshr(low, ir.Constant(_HALF, [4] * 16))
            names = builder.and_(
                builder.shuffle_vector(low, high, _order([*range(32)])), ir.Constant(_BYTES, [15] * 32)
            )
            for table, pair in zip(tables, totals, strict=True):
                at = builder.add(table, builder.mul(row, _WORD(TABLE_BYTES)))
                parts = [_look_up(builder, builder.add(at, _WORD(first)), names) for first in (0, 16)]
                for total, first in zip(pair, (0, 8), strict=True):  # tokens 0 to 7 and 16 to 23, then the others
                    lanes = [half + first + lane for half in (0, 16) for lane in range(8)]
                    mixed = builder.shuffle_vector(*parts, _order([each for i in lanes for each in (i, 32 + i)]))
                    builder.store(builder.add(builder.load(total), builder.bitcast(mixed, _SHORTS)), total)
        for address, pair in zip(sums, totals, strict=True):
            loaded = [builder.load(total) for total in pair]
            for half in (0, 8):
                lanes = [*range(half, half + 8), *range(16 + half, 24 + half)]
                place = builder.add(address, _WORD(4 * half))
                builder.store(
                    builder.shuffle_vector(*loaded, _order(lanes)), _pointer(builder, place, _SHORTS), align=2
                )
        return context.get_dummy_value()

    return types.void(sums, tables, types.uint64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def fill_table(typing_context: Any, table: Any, entries: Any) -> Any:
    """Write the sums of all subsets of four int16 entries as a table, both at addresses: bit j of a name is entry j."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        table, entries = arguments
        total = _ZERO
        for j in range(4):
            entry = builder.load(_pointer(builder, builder.add(entries, _WORD(2 * j)), _SHORT))
            one = builder.insert_element(ir.Constant(_SHORTS, ir.Undefined), entry, _INDEX(0))
            with_it = ir.Constant(_SHORTS, [-(name >> j & 1) for name in range(16)])
            total = builder.add(total, builder.and_(builder.shuffle_vector(one, one, _order([0] * 16)), with_it))
        for part in range(2):
            some = builder.trunc(builder.lshr(total, ir.Constant(_SHORTS, [8 * part] * 16)), _HALF)
            builder.store(some, _pointer(builder, builder.add(table, _WORD(16 * part)), _HALF), align=1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), generate
