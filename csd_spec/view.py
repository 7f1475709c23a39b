"""Where one layer's K and V lie: what the FTL tells the attention engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from csd_spec.model import KvLayout

BANK_SHIFT = 31
UNMAPPED = np.uint32(0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class KvView:
    """Slots of one layer of B sequences. A stream is one KV head of one sequence; N = B * H, sequence first.

    Slots are read through `banks`: bank slot >> 31 (flash, drive DRAM), page slot & 0x7FFFFFFF. A page is a row of
    FP16 bit patterns; `layout` says of what. An embedding group that has no pages is UNMAPPED; the token pages of K
    hold it.
    """

    layout: KvLayout
    banks: tuple[NDArray[np.uint16], NDArray[np.uint16]]
    seq_lens: NDArray[np.int64]  # (N,)
    k_slots: NDArray[np.uint32]  # (N, token groups)
    v_slots: NDArray[np.uint32]  # (N, token groups)
    e_slots: NDArray[np.uint32]  # (N, embedding pages, embedding groups)


def gather_rows(
    banks: tuple[NDArray[np.uint16], NDArray[np.uint16]], slots: NDArray[np.uint32], length: int, layout: KvLayout
) -> NDArray[np.float16]:
    """Rows (length, H, d) behind token slots (H, groups)."""
    values = layout.n * layout.head_dim
    pages = np.empty((*slots.shape, values), np.uint16)
    buffered = slots >> BANK_SHIFT != 0
    pages[~buffered] = banks[0][slots[~buffered], :values]
    pages[buffered] = banks[1][slots[buffered] - np.uint32(1 << BANK_SHIFT), :values]
    rows = pages.reshape(slots.shape[0], -1, layout.head_dim)[:, :length]
    return np.ascontiguousarray(rows.transpose(1, 0, 2)).view(np.float16)
