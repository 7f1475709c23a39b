"""Compiled loops that list the flash pages of a selection."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from csd_io.compiled import njit
from csd_spec.arrays import I64, U32
from csd_spec.view import BANK_SHIFT, UNMAPPED


class PageList(NamedTuple):
    """Flash pages of a selection; see `PagePlan`.

    Attributes:
        ppns: Pages, stream by stream, (P,).
        useful: Bytes of the selection in each page, (P,).
        words: Codewords of each page that cross the channel, (P,); 1 if whole pages do.
        ends: Number of pages up to and including each stream, (N,).
    """

    ppns: U32
    useful: I64
    words: I64
    ends: I64


class RowForm(NamedTuple):
    """Rows of a page, in bytes.

    Attributes:
        head_bytes: Before the first row; every row needs them.
        row_bytes: Distance between two rows.
        useful_bytes: Part of a row that is selected, with its share of the head.
        word_bytes: A codeword; 0 if whole pages cross the channel.
    """

    head_bytes: int
    row_bytes: int
    useful_bytes: int
    word_bytes: int


@njit(inline="always")
def _buffered(slot):  # type: ignore[no-untyped-def]
    return slot >> BANK_SHIFT


@njit(inline="always")
def _hit(slot, page, row, form, last, word, pages, ppns, useful, words):  # type: ignore[no-untyped-def]
    """Count one row of a page: adds the page unless it was the last one, and its codewords.

    Returns the number of pages found, and the last codeword. form: a `RowForm`.
    """
    new = page != last  # arithmetic instead of an unpredictable branch
    pages += new
    at = pages - 1
    ppns[at] = slot
    useful[at] += form.useful_bytes
    if form.word_bytes == 0:
        words[at] = 1
        return pages, 0
    if new:
        word = -1
        if form.head_bytes:
            word = (form.head_bytes - 1) // form.word_bytes
            words[at] += word + 1
    first = form.head_bytes + row * form.row_bytes
    end = (first + form.row_bytes - 1) // form.word_bytes
    words[at] += max(0, end - max(first // form.word_bytes, word + 1) + 1)
    return pages, max(end, word)


@njit(cache=True, nogil=True, error_model="numpy")
def plan_tokens(slots, selected, counts, per_group, unit_bytes, word_bytes):  # type: ignore[no-untyped-def]
    """List the flash pages of each stream's ascending selected tokens."""
    form = RowForm(0, unit_bytes, unit_bytes, word_bytes)
    ppns = np.empty(np.minimum(counts, slots.shape[1]).sum(), np.uint32)
    useful, words = np.zeros(ppns.size, np.int64), np.zeros(ppns.size, np.int64)
    ends, pages = np.empty(slots.shape[0], np.int64), 0
    for stream in range(slots.shape[0]):
        last, word = -1, -1
        for i in range(counts[stream]):
            group, row = divmod(selected[stream, i], per_group)
            slot = slots[stream, group]
            if _buffered(slot):
                continue
            pages, word = _hit(slot, group, row, form, last, word, pages, ppns, useful, words)
            last = group
        ends[stream] = pages
    return PageList(ppns[:pages], useful[:pages], words[:pages], ends)


@njit(cache=True, nogil=True, error_model="numpy")
def plan_channels(  # type: ignore[no-untyped-def]
    e_slots, k_slots, channels, seq_lens, m, T, n, k_row_bytes, k_value_bytes, run_bytes, scale_bytes, word_bytes
):
    """List the flash pages of each stream's ascending selected channels.

    A group without embedding pages is read from K's token pages, if they are in flash.
    """
    streams, parts, groups = e_slots.shape
    r = channels.shape[1]
    of_run = RowForm(scale_bytes, run_bytes, run_bytes + scale_bytes // m, word_bytes)
    of_row = RowForm(0, k_row_bytes, k_value_bytes * r, word_bytes)
    ppns = np.empty(streams * (min(r, parts) * groups + k_slots.shape[1]), np.uint32)
    useful, words = np.zeros(ppns.size, np.int64), np.zeros(ppns.size, np.int64)
    ends, pages = np.empty(streams, np.int64), 0
    for stream in range(streams):
        length = seq_lens[stream]
        for group in range((length + T - 1) // T):
            last, word = -1, -1
            if e_slots[stream, 0, group] == UNMAPPED:
                for token in range(group * T, min(length, (group + 1) * T)):
                    slot = k_slots[stream, token // n]
                    if _buffered(slot):
                        continue
                    page, row = token // n, token % n
                    pages, word = _hit(slot, page, row, of_row, last, word, pages, ppns, useful, words)
                    last = page
                continue
            for channel in channels[stream]:
                slot = e_slots[stream, channel // m, group]
                if _buffered(slot):
                    continue
                page, row = channel // m, channel % m
                pages, word = _hit(slot, page, row, of_run, last, word, pages, ppns, useful, words)
                last = page
        ends[stream] = pages
    return PageList(ppns[:pages], useful[:pages], words[:pages], ends)


def stack(tables: list[U32], groups: int) -> U32:
    """Stack the tables (streams, capacity) of several sequences to one (sum of streams, groups)."""
    if len(tables) == 1:
        return np.ascontiguousarray(tables[0][:, :groups])
    out = np.full((sum(table.shape[0] for table in tables), groups), UNMAPPED, np.uint32)
    row = 0
    for table in tables:
        width = min(groups, table.shape[1])
        out[row : row + table.shape[0], :width] = table[:, :width]
        row += table.shape[0]
    return out
