"""Compiled loops that list the flash pages of a selection."""

from __future__ import annotations

import numpy as np

from csd_io.compiled import njit
from csd_spec.arrays import U32
from csd_spec.view import BANK_SHIFT, UNMAPPED


@njit(inline="always")
def _buffered(slot):  # type: ignore[no-untyped-def]
    return slot >> BANK_SHIFT


@njit(inline="always")
def _hit(slot, page, row, form, last, word, found, ppns, useful, words):  # type: ignore[no-untyped-def]
    """Count one row of a page: adds the page unless it was the last one, and its codewords.

    Args:
        form: Bytes before the first row, which every row needs; bytes of a row; useful bytes of it; bytes of a
            codeword, 0 if whole pages cross the channel.

    Returns:
        Number of pages found, and the last codeword.
    """
    head_bytes, row_bytes, useful_bytes, word_bytes = form
    new = page != last  # arithmetic instead of an unpredictable branch
    found += new
    at = found - 1
    ppns[at] = slot
    useful[at] += useful_bytes
    if word_bytes == 0:
        words[at] = 1
        return found, 0
    if new:
        word = -1
        if head_bytes:
            word = (head_bytes - 1) // word_bytes
            words[at] += word + 1
    first = head_bytes + row * row_bytes
    end = (first + row_bytes - 1) // word_bytes
    words[at] += max(0, end - max(first // word_bytes, word + 1) + 1)
    return found, max(end, word)


@njit(cache=True, nogil=True, error_model="numpy")
def plan_tokens(slots, selected, counts, per_group, unit_bytes, word_bytes):  # type: ignore[no-untyped-def]
    """List the flash pages of each stream's ascending selected tokens."""
    form = 0, unit_bytes, unit_bytes, word_bytes
    ppns = np.empty(np.minimum(counts, slots.shape[1]).sum(), np.uint32)
    useful, words = np.zeros(ppns.size, np.int64), np.zeros(ppns.size, np.int64)
    ends, found = np.empty(slots.shape[0], np.int64), 0
    for stream in range(slots.shape[0]):
        last, word = -1, -1
        for i in range(counts[stream]):
            group, row = divmod(selected[stream, i], per_group)
            slot = slots[stream, group]
            if _buffered(slot):
                continue
            found, word = _hit(slot, group, row, form, last, word, found, ppns, useful, words)
            last = group
        ends[stream] = found
    return ppns[:found], useful[:found], words[:found], ends


@njit(cache=True, nogil=True, error_model="numpy")
def plan_channels(  # type: ignore[no-untyped-def]
    e_slots, k_slots, channels, seq_lens, m, T, n, of_k, run_bytes, scale_bytes, word_bytes
):
    """List the flash pages of each stream's ascending selected channels.

    A group without embedding pages is read from K's token pages, if they are in flash.

    Args:
        of_k: Bytes of a row of K, and of one value in it.
    """
    streams, parts, groups = e_slots.shape
    r = channels.shape[1]
    of_run = scale_bytes, run_bytes, run_bytes + scale_bytes // m, word_bytes
    of_row = 0, of_k[0], of_k[1] * r, word_bytes
    ppns = np.empty(streams * (min(r, parts) * groups + k_slots.shape[1]), np.uint32)
    useful, words = np.zeros(ppns.size, np.int64), np.zeros(ppns.size, np.int64)
    ends, found = np.empty(streams, np.int64), 0
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
                    found, word = _hit(slot, page, row, of_row, last, word, found, ppns, useful, words)
                    last = page
                continue
            for channel in channels[stream]:
                slot = e_slots[stream, channel // m, group]
                if _buffered(slot):
                    continue
                page, row = channel // m, channel % m
                found, word = _hit(slot, page, row, of_run, last, word, found, ppns, useful, words)
                last = page
        ends[stream] = found
    return ppns[:found], useful[:found], words[:found], ends


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
