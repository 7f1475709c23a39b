"""Wear leveling: which blocks are worn too little because their data does not change."""

from __future__ import annotations

import numpy as np

from ftl.flash.store import FlashStore

SPREAD = 2  # erases between the most and least worn block, beyond which cold data moves
DATA_PAGES = 22  # pages of the host's data for each page that moves to even wear out


def cold_blocks(store: FlashStore) -> list[int]:
    """Blocks whose data should move to worn ones now, the least worn first.

    How many follows what the host has written, so that leveling costs a known share.
    """
    counts, c = store.nand.erase_count, store.counters
    due = (c.data // DATA_PAGES - c.levelled) // store.geometry.pages_per_block
    if due <= 0 or store.placement.free_blocks < 2 * store.reserve + store.geometry.channels:
        return []  # moving takes room, and another time will do
    cold = np.flatnonzero((counts < int(counts.max()) - SPREAD) & (store.nand.bad == 0) & (store.nand.next_page > 0))
    best: list[int] = cold[np.argsort(counts[cold], kind="stable")][:due].tolist()
    return best
