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
def lay_each(pages, firsts, forms, lengths, k, v):  # type: ignore[no-untyped-def]
    """One row more of each sequence, of k or v (B, H, d), into the pages of maps that have some.

    firsts: `first` of each map and sequence, (maps, B, streams), -1 where it has no pages. forms: tokens of a group, m
    where rows lie channel by channel or 0, and whether they are of v, (maps, 3). lengths: rows before, (B,).
    """
    for i in range(firsts.shape[0]):
        per_group, m, of_v = forms[i]
        for j in range(lengths.size):
            first, position = firsts[i, j], lengths[j] % per_group
            if first[0] < 0:
                continue
            if m:
                lay_channels(pages, first, m, per_group, position, v[j : j + 1] if of_v else k[j : j + 1])
            else:
                lay_rows(pages, first, per_group, position, v[j : j + 1] if of_v else k[j : j + 1])
