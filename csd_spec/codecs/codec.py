"""A codec: how the values of a vector become bytes, and bytes values again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from csd_spec.arrays import U8, U16

Value = Literal["fp16", "bf16"]


@dataclass(frozen=True, slots=True)
class Codec:
    """Encoding of vectors: a row of K or V of one head, or one channel of K over the tokens of a page.

    What `encode` makes of decoded values must be the bytes they came from: rows are decoded and encoded again when
    their group fills up, when a sequence is cut, and when a drive is opened again.

    Attributes:
        name: Name in messages and reports.
        value: Format of decoded values, which q, k, v and the output have too.
        row_bytes: From the number of values of a vector to its bytes; grows with it.
        encode: From values (..., t) uint16 bit patterns to bytes (..., row_bytes(t)) uint8.
        decode: From those bytes and t to values (..., t) uint16 bit patterns.
        exact: The bytes are the values themselves, 2 bytes each.
        tag: Number by which compiled loops are found, in the FTL and in the attention kernels; None if there are none:
            then pages are decoded to `value` before they are attended.
    """

    name: str
    value: Value
    row_bytes: Callable[[int], int]
    encode: Callable[[U16], U8]
    decode: Callable[[U8, int], U16]
    exact: bool = False
    tag: int | None = None
