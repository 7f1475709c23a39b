"""Products of low-bit codes and int8 factors: multiplies four adjacent bytes and adds the products.

Sums are integers, so the order of additions has no effect on the result. The operation is one instruction on processors
with AVX-512 VNNI (64 bytes) or AVX-VNNI (32 bytes), two instructions with AVX2, and several instructions otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config

from attention_engine._lanes import BYTES, INDEX, SHORT, SUMS, all_of, call, load, pick, spread
from csd_spec.progressive import LANES, LINE


def _features() -> set[str]:
    if config.CPU_NAME or config.CPU_FEATURES:
        return {name[1:] for name in (config.CPU_FEATURES or "").split(",") if name.startswith("+")}
    return {name for name, has in llvm.get_host_cpu_features().items() if has}


def _instruction_set() -> str:
    """Return the instruction set that adds four products on this processor."""
    features = _features()
    if "avx512vnni" in features:
        return "avx512vnni"
    return next((name for name in ("avxvnni", "avx2") if name in features), "none")


WAY = _instruction_set()


def _in_halves(builder: Any, act: Callable[..., Any], *vectors: Any) -> Any:
    """Apply `act` to the lower and the upper halves of vectors, and join the results."""
    halves = []
    for upper in (False, True):
        parts = []
        for vector in vectors:
            half = vector.type.count // 2
            parts.append(pick(builder, vector, [*range(upper * half, upper * half + half)]))
        halves.append(act(*parts))
    return pick(builder, halves[0], [*range(2 * halves[0].type.count)], halves[1])


def add_products(builder: Any, sums: Any, codes: Any, factors: Any) -> Any:
    """Return sums (16 x int32) + codes (64 x uint8, below 16) x factors (64 x int8), added in fours."""
    if WAY == "avx512vnni":
        words = (builder.bitcast(vector, SUMS) for vector in (codes, factors))
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", SUMS, sums, *words)
    if WAY == "avxvnni":
        words = (builder.bitcast(vector, SUMS) for vector in (codes, factors))

        def half(a: Any, b: Any, c: Any) -> Any:
            return call(builder, "llvm.x86.avx512.vpdpbusd.256", a.type, a, b, c)

        return _in_halves(builder, half, sums, *words)
    if WAY == "avx2":
        return builder.add(sums, _in_halves(builder, lambda a, b: _fours_avx2(builder, a, b), codes, factors))
    wide = ir.VectorType(SHORT, LINE)
    products = builder.mul(builder.zext(codes, wide), builder.sext(factors, wide))
    for place in range(4):
        lane_sums = pick(builder, products, [4 * lane + place for lane in range(LANES)])
        sums = builder.add(sums, builder.sext(lane_sums, SUMS))
    return sums


def _fours_avx2(builder: Any, codes: Any, factors: Any) -> Any:
    """Add four adjacent products for 32 bytes. A pair of products fits 16 bits because a code is below 16."""
    shorts, words = ir.VectorType(SHORT, LANES), ir.VectorType(INDEX, LANES // 2)
    pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", shorts, codes, factors)
    return call(builder, "llvm.x86.avx2.pmadd.wd", words, pairs, all_of(shorts, 1))


def codes_of(builder: Any, line: Any, shift: int, bits: int) -> Any:
    """Return the codes of a line (16 x int32) at bit `shift` of each byte."""
    moved = builder.lshr(line, all_of(SUMS, shift)) if shift else line
    return builder.and_(builder.bitcast(moved, BYTES), all_of(BYTES, (1 << bits) - 1))


def factors_at(builder: Any, address: Any) -> Any:
    """Return the four factors at an address, repeated for every four codes of a line."""
    return builder.bitcast(spread(builder, load(builder, address, INDEX)), BYTES)
