"""Rows into pages: the loops.

pages: (N, values), at: which of them a stream's groups are, (streams, groups). rows: (t, H, d), of which the first is
number `position` of the first group.
"""

from __future__ import annotations

import numpy as np

from csd_io.compiled import njit
from csd_spec.arrays import I64, U16

_TOKENS = 64  # whose rows stay in the first cache while each channel of theirs is written
_WORD = 4  # values in 8 bytes
_EVEN, _ODD = np.uint64(0x0000FFFF0000FFFF), np.uint64(0xFFFF0000FFFF0000)
_LOW, _HIGH = np.uint64(0x00000000FFFFFFFF), np.uint64(0xFFFFFFFF00000000)
_16, _32 = np.uint64(16), np.uint64(32)


@njit(cache=True, nogil=True, error_model="numpy")
def lay_rows(pages, at, per_group, position, rows):  # type: ignore[no-untyped-def]
    """Rows behind each other, per_group to a page."""
    tokens, heads, d = rows.shape
    group, begin = 0, position * d
    for token in range(tokens):
        for head in range(heads):
            to, row = pages[at[head, group], begin : begin + d], rows[token, head]
            for channel in range(d):  # slices, whose indices need no check, so that this loop is wide
                to[channel] = row[channel]
        begin += d
        if begin == per_group * d:
            group, begin = group + 1, 0


def lay_many(pages: U16, at: I64, m: int, T: int, position: int, rows: U16) -> None:
    """Channel by channel: a page holds T tokens of m channels of a head."""
    tokens, before = rows.shape[0], -position % _WORD
    if tokens < before + _WORD or any(size % _WORD for size in (T, pages.shape[1], rows.shape[2])):
        lay_channels(pages, at, m, T, position, rows)
        return
    end = tokens - (tokens - before) % _WORD
    lay_channels(pages, at, m, T, position, rows[:before])
    _lay_words(pages.view(np.uint64), at, m, T, position + before, rows[before:end].view(np.uint64))
    lay_channels(pages, at, m, T, position + end, rows[end:])


@njit(cache=True, nogil=True, error_model="numpy")
def lay_channels(pages, at, m, T, position, rows):  # type: ignore[no-untyped-def]
    """`lay_many` for few rows."""
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
def _turned(a, b, c, d):  # type: ignore[no-untyped-def]
    """Four words as a matrix of 4 x 4 values, transposed."""
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
    """Where a channel's words go from a row on. at: pages of a head's parts, (parts,)."""
    part, i = divmod(channel, m)
    begin = (i * T + row) // _WORD
    return pages[at[part], begin : begin + count]


@njit(cache=True, nogil=True, error_model="numpy")
def _lay_words(pages, at, m, T, position, rows):  # type: ignore[no-untyped-def]
    """`lay_many` in words of four values: those of four tokens and four channels are turned at once."""
    tokens, heads, words = rows.shape
    parts = (words * _WORD + m - 1) // m
    for head in range(heads):
        begin = 0
        while begin < tokens:
            group, row = divmod(position + begin, T)
            count = min(_TOKENS, tokens - begin, T - row) // _WORD
            mine = at[head * parts : head * parts + parts, group]
            for word in range(words):
                of, channel = rows[begin : begin + _WORD * count, head, word], word * _WORD
                to0 = _words_of(pages, mine, m, T, channel, row, count)
                to1 = _words_of(pages, mine, m, T, channel + 1, row, count)
                to2 = _words_of(pages, mine, m, T, channel + 2, row, count)
                to3 = _words_of(pages, mine, m, T, channel + 3, row, count)
                for i in range(count):
                    t = _WORD * i
                    to0[i], to1[i], to2[i], to3[i] = _turned(of[t], of[t + 1], of[t + 2], of[t + 3])
            begin += _WORD * count


@njit(cache=True, nogil=True)
def _lay_one(pages, at, per_group, m, position, row):  # type: ignore[no-untyped-def]
    if m:
        lay_channels(pages, at, m, per_group, position, row)
    else:
        lay_rows(pages, at, per_group, position, row)


@njit(cache=True, nogil=True)
def lay_each(pages, ats, forms, lengths, k, v):  # type: ignore[no-untyped-def]
    """One row more of each sequence, of k or v (B, H, d), into pages under construction.

    ats: `at` of each map, (maps, streams, 1). forms: which sequence's it is, tokens of a group, m where rows lie
    channel by channel or 0, and whether they are of v, (maps, 4). lengths: rows before, (B,).
    """
    for i in range(ats.shape[0]):
        number, per_group, m, of_v = forms[i]
        position = lengths[number] % per_group
        if of_v:
            _lay_one(pages, ats[i], per_group, m, position, v[number : number + 1])
        else:
            _lay_one(pages, ats[i], per_group, m, position, k[number : number + 1])
