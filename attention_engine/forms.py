"""Tuples that kernels take: locations of pages, and formats of pages and rows.

Their fields have names in compiled code, too, at no cost.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Banks(NamedTuple):
    """Location of pages in memory.

    Attributes:
        flash, dram: Tagged addresses of both banks.
        page_bytes: Bytes of a page.
        row_bytes: Bytes of a row.
    """

    flash: np.uint64
    dram: np.uint64
    page_bytes: np.uint64
    row_bytes: np.uint64


class EmbeddingForm(NamedTuple):
    """Format of embedding pages.

    Attributes:
        m: Channels of a page.
        T: Tokens of a group.
        n: Tokens of a page of K.
        bits: Bits of a value.
        scale_bytes: Bytes of a page's scales and minimums.
        run_bytes: Bytes of a channel's values.
    """

    m: int
    T: int
    n: int
    bits: int
    scale_bytes: int
    run_bytes: int


class RowRun(NamedTuple):
    """Adjacent rows of K or V.

    Attributes:
        at: Address of the first row.
        rows: Number of rows.
        coded: Whether they are codes.
    """

    at: np.uint64
    rows: int
    coded: bool


class RunForm(NamedTuple):
    """Format of the rows of a group.

    Attributes:
        n: Tokens of a page.
        header_bytes: Bytes of a page before its rows.
        parts: Parts of a page: K, and V unless it is a part of K.
        waiting: Tokens of one buffer of an incomplete group.
    """

    n: int
    header_bytes: int
    parts: int
    waiting: int


class ScoreForm(NamedTuple):
    """Format of score pages.

    Attributes:
        m: Channels of a page.
        T: Tokens of a page.
        digits: Digits of a token.
        header_bytes: Bytes before the digits.
        bf16: Whether numbers of the header are BF16.
    """

    m: int
    T: int
    digits: int
    header_bytes: int
    bf16: bool


class ValueForm(NamedTuple):
    """Format of value pages.

    Attributes:
        m: Channels of a page.
        bits: Bits of a value.
        sizes_bytes: Bytes of the sizes of the tokens, which come first.
        header_bytes: Bytes before the values.
        bf16: Whether numbers of the header are BF16.
    """

    m: int
    bits: int
    sizes_bytes: int
    header_bytes: int
    bf16: bool


class ScoreScratch(NamedTuple):
    """Buffers of `_score_page`, as arrays or as their addresses."""

    factors: Any
    entries: Any
    line: Any
    scales: Any


class ValuePage(NamedTuple):
    """A value page.

    Attributes:
        bits: Bits of a value.
        sizes, rests: Addresses of the sizes of its tokens, and of the squares of its channels' mean errors.
        tokens: Number of tokens.
        lines: Lines of a block.
        blocks: Number of blocks.
        at: Address of the first line.
        prefetch_offset: Offset to the page to prefetch.
    """

    bits: int
    sizes: np.uint64
    rests: np.uint64
    tokens: int
    lines: int
    blocks: int
    at: np.uint64
    prefetch_offset: np.uint64
