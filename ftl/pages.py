"""Where a layer lies, and which flash pages are behind a selection."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from csd_spec import KvLayout
from ftl.groups import BANK_SHIFT, UNMAPPED

I64 = NDArray[np.int64]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class KvView:
    """Where one layer of B sequences lies. A stream is one KV head of one sequence; N = B * H, sequence first.

    Slots are read through `banks`: bank slot >> 31 (flash, drive DRAM), page slot & 0x7FFFFFFF. A page is a row of
    FP16 bit patterns.
    """

    layout: KvLayout
    banks: tuple[U16, U16]
    seq_lens: I64  # (N,)
    k_slots: U32  # (N, token groups)
    v_slots: U32  # (N, token groups)
    e_slots: U32  # (N, embedding pages, embedding groups)


@dataclass(frozen=True, slots=True)
class PagePlan:
    """Distinct flash pages behind a selection, how many selected rows or channel runs lie in each, and how many
    bytes of each have to cross the channel: the codewords that hold them."""

    ppns: U32  # (P,)
    hits: I64  # (P,)
    nbytes: I64  # (P,)


@njit(inline="always")
def _hit(row, unit_bytes, word_bytes, at, hits, words, last_word):  # type: ignore[no-untyped-def]
    """Count one selected row of a page and the codewords that it adds; returns the last codeword so far.

    word_bytes = 0: whole pages cross the channel, one word each.
    """
    hits[at] += 1
    if word_bytes == 0:
        words[at] = 1
        return 0
    first, end = row * unit_bytes // word_bytes, ((row + 1) * unit_bytes - 1) // word_bytes
    words[at] += end - max(first, last_word + 1) + 1
    return end


@njit(cache=True, nogil=True, error_model="numpy")
def plan_tokens(slots, selected, counts, per_group, unit_bytes, word_bytes):  # type: ignore[no-untyped-def]
    """Pages of each stream's ascending selected tokens that are in flash."""
    ppns = np.empty(counts.sum(), np.uint32)
    hits, words = np.zeros(ppns.size, np.int64), np.zeros(ppns.size, np.int64)
    found = 0
    for stream in range(slots.shape[0]):
        last, word = -1, -1
        for i in range(counts[stream]):
            group, row = divmod(selected[stream, i], per_group)
            slot = slots[stream, group]
            if slot >> BANK_SHIFT:
                continue
            if group != last:
                ppns[found] = slot
                found += 1
                last, word = group, -1
            word = _hit(row, unit_bytes, word_bytes, found - 1, hits, words, word)
    return ppns[:found], hits[:found], words[:found]


@njit(cache=True, nogil=True, error_model="numpy")
def plan_channels(slots, channels, seq_lens, m, per_group, unit_bytes, word_bytes):  # type: ignore[no-untyped-def]
    """Embedding pages of each stream's ascending selected channels that are in flash."""
    streams, _, groups = slots.shape
    ppns = np.empty(streams * channels.shape[1] * groups, np.uint32)
    hits, words = np.zeros(ppns.size, np.int64), np.zeros(ppns.size, np.int64)
    found = 0
    for stream in range(streams):
        used = (seq_lens[stream] + per_group - 1) // per_group
        for group in range(used):
            last, word = -1, -1
            for channel in channels[stream]:
                slot = slots[stream, channel // m, group]
                if slot >> BANK_SHIFT:
                    continue
                if channel // m != last:
                    ppns[found] = slot
                    found += 1
                    last, word = channel // m, -1
                word = _hit(channel % m, unit_bytes, word_bytes, found - 1, hits, words, word)
    return ppns[:found], hits[:found], words[:found]


def stack(tables: list[U32], groups: int) -> U32:
    """Tables (streams, capacity) of several sequences as one (sum of streams, groups)."""
    if len(tables) == 1:
        return np.ascontiguousarray(tables[0][:, :groups])
    out = np.full((sum(table.shape[0] for table in tables), groups), UNMAPPED, np.uint32)
    row = 0
    for table in tables:
        width = min(groups, table.shape[1])
        out[row : row + table.shape[0], :width] = table[:, :width]
        row += table.shape[0]
    return out
