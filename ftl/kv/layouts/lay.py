"""Rows into pages: the loops."""

from __future__ import annotations

from numba import njit

_TOKENS = 64  # whose rows stay in the first cache while each channel of theirs is written


@njit(cache=True, nogil=True)
def lay_rows(pages, first, per_group, position, rows):  # type: ignore[no-untyped-def]
    """Rows (t, H, d) behind each other, per_group to a page: from row `position` of page first[h] on, and in the pages
    behind it."""
    tokens, heads, d = rows.shape
    for head in range(heads):
        page, at = first[head], position
        for token in range(tokens):
            for channel in range(d):
                pages[page, at * d + channel] = rows[token, head, channel]
            at += 1
            if at == per_group:
                page, at = page + 1, 0


@njit(cache=True, nogil=True)
def lay_channels(pages, first, m, T, position, rows):  # type: ignore[no-untyped-def]
    """The same channel by channel: a page holds T tokens of m channels of a head, and first is by stream."""
    tokens, heads, d = rows.shape
    parts = (d + m - 1) // m
    for head in range(heads):
        for begin in range(0, tokens, _TOKENS):
            for channel in range(d):
                group, at = divmod(position + begin, T)
                page, run = first[head * parts + channel // m], channel % m * T
                for token in range(begin, min(begin + _TOKENS, tokens)):
                    pages[page + group, run + at] = rows[token, head, channel]
                    at += 1
                    if at == T:
                        group, at = group + 1, 0


@njit(cache=True, nogil=True)
def _lay_one(pages, first, per_group, m, position, row):  # type: ignore[no-untyped-def]
    if m:
        lay_channels(pages, first, m, per_group, position, row)
    else:
        lay_rows(pages, first, per_group, position, row)


@njit(cache=True, nogil=True)
def lay_each(pages, firsts, forms, lengths, k, v):  # type: ignore[no-untyped-def]
    """One row more of each sequence, of k or v (B, H, d), into pages under construction.

    firsts: `first` of each map, (maps, streams). forms: which sequence's it is, tokens of a group, m where rows lie
    channel by channel or 0, and whether they are of v, (maps, 4). lengths: rows before, (B,).
    """
    for i in range(firsts.shape[0]):
        number, per_group, m, of_v = forms[i]
        position = lengths[number] % per_group
        if of_v:
            _lay_one(pages, firsts[i], per_group, m, position, v[number : number + 1])
        else:
            _lay_one(pages, firsts[i], per_group, m, position, k[number : number + 1])
