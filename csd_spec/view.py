"""KV view: locations of one layer's keys and values, passed from the FTL to the attention engine.

A *slot* locates a group: a physical page number or, with bit 31 set, the number of a page buffer in drive DRAM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csd_spec.arrays import F16, I64, U8, U16, U32
from csd_spec.layouts import PageFormat

BANK_SHIFT = 31
UNMAPPED = np.uint32(0xFFFFFFFF)  # neither in flash nor in a buffer
_DRAM = np.uint32(1 << BANK_SHIFT)


def in_flash(slots: U32) -> NDArray[np.bool_]:
    """Whether each slot is a flash page."""
    return slots < _DRAM


def dram_slots(buffers: I64) -> U32:
    """Slots of page buffers."""
    slots: U32 = buffers.astype(np.uint32) | _DRAM
    return slots


def buffers_of(slots: U32) -> U32:
    """Page buffers of slots that are not flash pages."""
    return slots - _DRAM


@dataclass(frozen=True, slots=True)
class KvSlotView:
    """Slots of one layer of B sequences. A stream is one KV head of one sequence; N = B * H, sequence first.

    Slots are read through `banks`: bank slot >> 31 (flash, drive DRAM), page slot & 0x7FFFFFFF. A page is a row of
    FP16 bit patterns in the format of `layout`. An embedding group without pages is UNMAPPED; the token pages of K
    hold it. A group staged in several buffers (`Progressive.buffers`) has one slot in k_slots per buffer.

    Attributes:
        maps: All maps of the layout by name, (N, pages per head, groups), for methods that read others.
        kept: Derived data of these slots, cached until the slots change.
    """

    layout: PageFormat
    banks: tuple[U16, U16]
    seq_lens: I64  # (N,)
    k_slots: U32  # (N, token groups)
    v_slots: U32  # (N, token groups)
    e_slots: U32  # (N, embedding pages, embedding groups)
    maps: Mapping[str, U32] = field(default_factory=lambda: MappingProxyType({}))
    kept: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


def gather_pages(banks: tuple[U16, U16], slots: U32, nbytes: int) -> U8:
    """Return the first `nbytes` bytes of pages, (*slots.shape, nbytes)."""
    words = -(-nbytes // 2)
    pages = np.empty((*slots.shape, words), np.uint16)
    flash = in_flash(slots)
    pages[flash] = banks[0][slots[flash], :words]
    pages[~flash] = banks[1][buffers_of(slots[~flash]), :words]
    return pages.view(np.uint8)[..., :nbytes]


def gather_rows(banks: tuple[U16, U16], slots: U32, length: int, layout: PageFormat) -> F16:
    """Return rows (length, H, d) of token slots (H, groups), decoded to 2 bytes per value."""
    pages = gather_pages(banks, slots, layout.n * layout.row_bytes)
    rows = pages.reshape(slots.shape[0], -1, layout.row_bytes)[:, :length]
    by_token = np.ascontiguousarray(rows.transpose(1, 0, 2))
    return layout.rows.decode(by_token, layout.head_dim).view(np.float16)
