"""Rows and runs of 8-bit values, each with an exponent of its own (`csd_spec.float8`)."""

from __future__ import annotations

import numpy as np

from csd_io.compiled import njit
from csd_spec import KvLayout
from csd_spec.arrays import F16, I64, U8, U16
from csd_spec.float8 import decoded
from ftl.kv.layouts.coded import PackedEmbeddingMap
from ftl.kv.layouts.group_map import POISON
from ftl.kv.layouts.lay import lay_rows
from ftl.kv.layouts.token import RowMap

LEAST, MOST = 17, 253  # fields of the largest value's exponent: all that is stored is a normal BF16 below infinity
MAX_CODE = 0x7E  # 448; one more is no number


def encoded(values: U16) -> U8:
    """Vectors (..., t + 1) of bits of finite BF16 values (..., t), rounded to the nearest, ties to even.

    The largest value of a vector, rounded to 4 bits, gets a code in [128, 256): normal codes reach 2^-14 of that, and
    those below have a quantum of 2^-17 of it. So what is decoded is encoded as it was. Largest values below 2^-110
    count as that, and above 1.75 x 2^127 values are that.
    """
    out = np.empty((*values.shape[:-1], values.shape[-1] + 1), np.uint8)
    flat = np.ascontiguousarray(values).reshape(-1, values.shape[-1])
    _encode(flat, out.reshape(-1, out.shape[-1]))
    return out


@njit(inline="always")
def _shifted(bits, by):  # type: ignore[no-untyped-def]
    """bits / 2^by, rounded to the nearest, ties to even."""
    return (bits + (1 << by - 1) - 1 + (bits >> by & 1)) >> by


@njit(inline="always")
def _exponent(values):  # type: ignore[no-untyped-def]
    """The exponent field of the largest of values, rounded."""
    largest = np.int64(0)
    for value in values:
        largest = max(largest, np.int64(value & np.uint16(0x7FFF)))
    return _shifted(largest, 4) >> 3


@njit(cache=True, nogil=True)
def _encode(values, out):  # type: ignore[no-untyped-def]
    for i in range(values.shape[0]):
        top = min(max(_exponent(values[i]), LEAST), MOST)
        out[i, 0] = top + 1
        for j in range(values.shape[1]):
            bits = np.int64(values[i, j])
            exponent, sign = bits >> 7 & 0xFF, bits >> 8 & 0x80
            field = exponent - top + 14  # of a code
            normal, by = max(field, 1), 4 + max(1 - field, 0)
            significand = bits & 0x7F | (0x80 if exponent else 0)
            code = (normal - 1 << 3) + (_shifted(significand, by) if by < 10 else 0)
            out[i, j + 1] = sign | min(code, MAX_CODE)


def kept(layout: KvLayout, rows: F16) -> F16:
    """Rows (..., d) as a layout keeps them: what they are where that is of 2 bytes a value."""
    return decoded(encoded(rows.view(np.uint16))).view(np.float16) if layout.fp8 else rows


class Float8Map(RowMap):
    """K or V, row after row: n rows of d + 1 bytes a page."""

    def write(self, pages: U16, at: I64, position: int, rows: U16) -> None:
        lay_rows(pages.view(np.uint8), at, self.per_group, position, encoded(rows))

    def fill(self, content: U16, buffers: I64, position: int, rows: U16) -> None:
        self.write(content, buffers[:, None], position, rows)

    def poison(self, content: U16, buffers: I64, position: int) -> None:
        content.view(np.uint8)[buffers, position * self.layout.row_bytes :] = POISON >> 8

    def waiting(self, content: U16, layer: int, count: int) -> U16:
        rows = content.view(np.uint8)[self.buffers[layer], : count * self.layout.row_bytes]
        return decoded(rows.reshape(self.heads, count, -1).transpose(1, 0, 2))


class Float8EmbeddingMap(PackedEmbeddingMap):
    """A copy of K, channel after channel: m runs of T + 1 bytes a page."""

    def parts(self, runs: U16) -> tuple[U8, ...]:
        return (encoded(runs),)
