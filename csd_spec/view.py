"""Where one layer's K and V lie: what the FTL tells the attention engine.

A *slot* says where a group is: a physical page number, or with bit 31 set the number of a group buffer in drive DRAM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csd_spec.arrays import F16, I64, U8, U16, U32
from csd_spec.layouts import PageForm

BANK_SHIFT = 31
UNMAPPED = np.uint32(0xFFFFFFFF)  # neither in flash nor in a buffer
_DRAM = np.uint32(1 << BANK_SHIFT)


def in_flash(slots: U32) -> NDArray[np.bool_]:
    """Which slots are flash pages."""
    return slots < _DRAM


def dram_slots(buffers: I64) -> U32:
    """Slots of group buffers."""
    slots: U32 = buffers.astype(np.uint32) | _DRAM
    return slots


def buffers_of(slots: U32) -> U32:
    """Group buffers behind slots that are not flash pages."""
    return slots - _DRAM


@dataclass(frozen=True, slots=True)
class KvView:
    """Slots of one layer of B sequences. A stream is one KV head of one sequence; N = B * H, sequence first.

    Slots are read through `banks`: bank slot >> 31 (flash, drive DRAM), page slot & 0x7FFFFFFF. A page is a row of
    FP16 bit patterns; `layout` says of what. An embedding group that has no pages is UNMAPPED; the token pages of K
    hold it. Of a group whose rows wait in several buffers (`Progressive.buffers`), k_slots have as many slots. maps:
    all maps of the layout by name, (N, pages of a head, groups), for methods that read others. kept: what has been
    found out about these slots; it is the next view's too, as long as they stay.
    """

    layout: PageForm
    banks: tuple[U16, U16]
    seq_lens: I64  # (N,)
    k_slots: U32  # (N, token groups)
    v_slots: U32  # (N, token groups)
    e_slots: U32  # (N, embedding pages, embedding groups)
    maps: Mapping[str, U32] = field(default_factory=lambda: MappingProxyType({}))
    kept: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


def gather_pages(banks: tuple[U16, U16], slots: U32, nbytes: int) -> U8:
    """The first bytes of pages, (*slots.shape, nbytes)."""
    words = -(-nbytes // 2)
    pages = np.empty((*slots.shape, words), np.uint16)
    flash = in_flash(slots)
    pages[flash] = banks[0][slots[flash], :words]
    pages[~flash] = banks[1][buffers_of(slots[~flash]), :words]
    return pages.view(np.uint8)[..., :nbytes]


def gather_rows(banks: tuple[U16, U16], slots: U32, length: int, layout: PageForm) -> F16:
    """Rows (length, H, d) of token slots (H, groups), decoded to 2 bytes a value."""
    pages = gather_pages(banks, slots, layout.n * layout.row_bytes)
    rows = pages.reshape(slots.shape[0], -1, layout.row_bytes)[:, :length]
    by_token = np.ascontiguousarray(rows.transpose(1, 0, 2))
    return layout.rows.decode(by_token, layout.head_dim).view(np.float16)
