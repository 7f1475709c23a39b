"""Compiled loops that pack rows into pages.

Arguments: pages (N, values); at (streams, groups), the page of each stream's groups; rows (t, H, d); position, the
index of the first row in the first group.
"""

from __future__ import annotations

import numpy as np

from csd_io.compiled import njit
from csd_spec.arrays import I64, U16

_TOKENS = 64  # tokens per block: their rows stay in the L1 cache while each of their channels is written
_WORD = 4  # values in 8 bytes
_EVEN, _ODD = np.uint64(0x0000FFFF0000FFFF), np.uint64(0xFFFF0000FFFF0000)
_LOW, _HIGH = np.uint64(0x00000000FFFFFFFF), np.uint64(0xFFFFFFFF00000000)
_16, _32 = np.uint64(16), np.uint64(32)


@njit(cache=True, nogil=True, error_model="numpy")
def pack_rows(pages, at, per_group, position, rows):  # type: ignore[no-untyped-def]
    """Pack rows one after the other, per_group to a page."""
    tokens, heads, d = rows.shape
    group, begin = 0, position * d
    for token in range(tokens):
        for head in range(heads):
            to, row = pages[at[head, group], begin : begin + d], rows[token, head]
            for channel in range(d):  # slices need no bounds checks: the loop is vectorized
                to[channel] = row[channel]
        begin += d
        if begin == per_group * d:
            group, begin = group + 1, 0


def pack_channels_blocked(pages: U16, at: I64, m: int, T: int, position: int, rows: U16) -> None:
    """Pack rows channel by channel, in cache blocks: a page holds T tokens of m channels of a head."""
    tokens, before = rows.shape[0], -position % _WORD
    if tokens < before + _WORD or any(size % _WORD for size in (T, pages.shape[1], rows.shape[2])):
        pack_channels(pages, at, m, T, position, rows)
        return
    end = tokens - (tokens - before) % _WORD
    pack_channels(pages, at, m, T, position, rows[:before])
    _pack_words(pages.view(np.uint64), at, m, T, position + before, rows[before:end].view(np.uint64))
    pack_channels(pages, at, m, T, position + end, rows[end:])


@njit(cache=True, nogil=True, error_model="numpy")
def pack_channels(pages, at, m, T, position, rows):  # type: ignore[no-untyped-def]
    """Same result as `pack_channels_blocked`, for few rows."""
    tokens, heads, d = rows.shape
    parts = (d + m - 1) // m
    for token in range(tokens):
        group, row = divmod(position + token, T)
        for head in range(heads):
            for part in range(parts):
                to, values = pages[at[head * parts + part, group]], rows[token, head, part * m : part * m + m]
                for i in range(values.size):
                    to[i * T + row] = values[i]


@njit(inline="always")
def _transpose_4x4(a, b, c, d):  # type: ignore[no-untyped-def]
    """Transpose four words as a 4 x 4 matrix of 16-bit values."""
    ab_even, ab_odd = a & _EVEN | (b & _EVEN) << _16, (a & _ODD) >> _16 | b & _ODD
    cd_even, cd_odd = c & _EVEN | (d & _EVEN) << _16, (c & _ODD) >> _16 | d & _ODD
    return (
        ab_even & _LOW | cd_even << _32,
        ab_odd & _LOW | cd_odd << _32,
        ab_even >> _32 | cd_even & _HIGH,
        ab_odd >> _32 | cd_odd & _HIGH,
    )


@njit(inline="always")
def _words_of(pages, at, m, T, channel, row, count):  # type: ignore[no-untyped-def]
    """Words of a channel from a row on; `at` (parts,) are the pages of a head's parts."""
    part, i = divmod(channel, m)
    begin = (i * T + row) // _WORD
    return pages[at[part], begin : begin + count]


@njit(cache=True, nogil=True, error_model="numpy")
def _pack_words(pages, at, m, T, position, rows):  # type: ignore[no-untyped-def]
    """`pack_channels_blocked` in words of four values: 4 tokens x 4 channels are transposed at a time."""
    tokens, heads, words = rows.shape
    parts = (words * _WORD + m - 1) // m
    for head in range(heads):
        begin = 0
        while begin < tokens:
            group, row = divmod(position + begin, T)
            count = min(_TOKENS, tokens - begin, T - row) // _WORD
            page = at[head * parts : head * parts + parts, group]
            for word in range(words):
                of, channel = rows[begin : begin + _WORD * count, head, word], word * _WORD
                to0 = _words_of(pages, page, m, T, channel, row, count)
                to1 = _words_of(pages, page, m, T, channel + 1, row, count)
                to2 = _words_of(pages, page, m, T, channel + 2, row, count)
                to3 = _words_of(pages, page, m, T, channel + 3, row, count)
                for i in range(count):
                    t = _WORD * i
                    to0[i], to1[i], to2[i], to3[i] = _transpose_4x4(of[t], of[t + 1], of[t + 2], of[t + 3])
            begin += _WORD * count


@njit(cache=True, nogil=True)
def _append_row(pages, at, per_group, m, position, row):  # type: ignore[no-untyped-def]
    if m:
        pack_channels(pages, at, m, per_group, position, row)
    else:
        pack_rows(pages, at, per_group, position, row)


@njit(cache=True, nogil=True)
def append_rows(pages, ats, forms, lengths, k, v):  # type: ignore[no-untyped-def]
    """Append one row to the open page of each map, from k or v (B, H, d).

    Args:
        ats: `at` of each map, (maps, streams, 1).
        forms: Per map: sequence number, tokens per group, m (0 if row after row), 1 for rows of V; (maps, 4).
        lengths: Rows of each sequence before, (B,).
    """
    for i in range(ats.shape[0]):
        number, per_group, m, of_v = forms[i]
        position = lengths[number] % per_group
        if of_v:
            _append_row(pages, ats[i], per_group, m, position, v[number : number + 1])
        else:
            _append_row(pages, ats[i], per_group, m, position, k[number : number + 1])
