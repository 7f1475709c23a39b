"""Maps of rows and channels that are stored in a codec's format (`csd_spec.codecs`); the compiled loop of FP8."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from csd_io.compiled import njit
from csd_spec import PageFormat
from csd_spec.arrays import F16, I64, U8, U16
from csd_spec.codecs import FP8, Codec
from csd_spec.codecs.fp8 import MAX_CODE, MAX_EXPONENT, MIN_EXPONENT
from ftl.kv.layouts.coded import PackedEmbeddingMap
from ftl.kv.layouts.group_map import POISON
from ftl.kv.layouts.packing import pack_rows
from ftl.kv.layouts.token import RowMap


def encode_rows(codec: Codec, values: U16) -> U8:
    """Encode values (..., t) to bytes (..., row_bytes(t)), with a compiled loop if the codec has one."""
    loop = _LOOPS.get(codec.tag)
    if loop is None:
        return codec.encode(values)
    t = values.shape[-1]
    out = np.empty((*values.shape[:-1], codec.row_bytes(t)), np.uint8)
    loop(np.ascontiguousarray(values).reshape(-1, t), out.reshape(-1, out.shape[-1]))
    return out


@njit(inline="always")
def _shifted(bits, by):  # type: ignore[no-untyped-def]
    """bits / 2^by, rounded to nearest, ties to even."""
    return (bits + (1 << by - 1) - 1 + (bits >> by & 1)) >> by


@njit(inline="always")
def _exponent(values):  # type: ignore[no-untyped-def]
    """Exponent field of the largest value, rounded."""
    largest = np.int64(0)
    for value in values:
        largest = max(largest, np.int64(value & np.uint16(0x7FFF)))
    return _shifted(largest, 4) >> 3


@njit(cache=True, nogil=True)
def _encode_fp8(values, out):  # type: ignore[no-untyped-def]
    """Compiled `csd_spec.codecs.fp8.encode`: values (N, t) to out (N, t + 1)."""
    for i in range(values.shape[0]):
        top = min(max(_exponent(values[i]), MIN_EXPONENT), MAX_EXPONENT)
        out[i, 0] = top + 1
        for j in range(values.shape[1]):
            bits = np.int64(values[i, j])
            exponent, sign = bits >> 7 & 0xFF, bits >> 8 & 0x80
            field = exponent - top + 14  # exponent field of the code
            normal, by = max(field, 1), 4 + max(1 - field, 0)
            significand = bits & 0x7F | (0x80 if exponent else 0)
            code = (normal - 1 << 3) + (_shifted(significand, by) if by < 10 else 0)
            out[i, j + 1] = sign | min(code, MAX_CODE)


_LOOPS: dict[int | None, Callable[[U16, U8], None]] = {FP8.tag: _encode_fp8}


def round_to_codec(form: PageFormat, rows: F16) -> F16:
    """Round rows (..., d) to the values that are read back: those of the layout's codec."""
    codec = form.rows
    if codec.exact:
        return rows
    return codec.decode(encode_rows(codec, rows.view(np.uint16)), rows.shape[-1]).view(np.float16)


class CodecRowMap(RowMap):
    """Keys or values, row after row: n encoded rows per page."""

    def write(self, pages: U16, at: I64, position: int, rows: U16) -> None:
        pack_rows(pages.view(np.uint8), at, self.per_group, position, encode_rows(self.layout.rows, rows))

    def fill(self, content: U16, buffers: I64, position: int, rows: U16) -> None:
        self.write(content, buffers[:, None], position, rows)

    def fill_nan(self, content: U16, buffers: I64, position: int) -> None:
        content.view(np.uint8)[buffers, position * self.layout.row_bytes :] = POISON >> 8

    def buffered_rows(self, content: U16, layer: int, count: int) -> U16:
        rows = content.view(np.uint8)[self.buffers[layer], : count * self.layout.row_bytes]
        by_token = rows.reshape(self.heads, count, -1).transpose(1, 0, 2)
        return self.layout.rows.decode(by_token, self.layout.head_dim)


class CodecEmbeddingMap(PackedEmbeddingMap):
    """A copy of K, channel by channel: m encoded vectors of T tokens per page."""

    def parts(self, runs: U16) -> tuple[U8, ...]:
        return (encode_rows(self.layout.rows, runs),)
