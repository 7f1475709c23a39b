"""Codec interface: encodes a vector of values to bytes and decodes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from csd_spec.arrays import U8, U16

Value = Literal["fp16", "bf16"]


@dataclass(frozen=True, slots=True)
class Codec:
    """Encoding of vectors: a row of K or V of one head, or one channel of K over the tokens of a page.

    Encoding decoded values must give the same bytes again: rows are decoded and encoded again when their group becomes
    full, when a sequence is truncated, and when a drive is opened.

    Attributes:
        name: Name in messages and reports.
        value: Format of decoded values, which is also that of q, k, v and the output.
        row_bytes: Maps the number of values of a vector to its bytes; increasing.
        encode: Maps values (..., t), uint16 bit patterns, to bytes (..., row_bytes(t)), uint8.
        decode: Maps these bytes and t to values (..., t), uint16 bit patterns.
        exact: The bytes are the values themselves, 2 bytes each.
        tag: Number of the compiled loops in the FTL and the attention kernels; None if there are none: pages are then
            decoded to `value` before they are attended.
    """

    name: str
    value: Value
    row_bytes: Callable[[int], int]
    encode: Callable[[U16], U8]
    decode: Callable[[U8, int], U16]
    exact: bool = False
    tag: int | None = None
