"""Wear leveling: finds blocks with low wear whose data is cold."""

from __future__ import annotations

import numpy as np

from ftl.flash.store import FlashStore

SPREAD = 2  # difference in erase count from which cold data is moved
DATA_PAGES = 22  # pages of host data per page moved by wear leveling


def cold_blocks(store: FlashStore) -> list[int]:
    """Blocks whose data should move to worn blocks now, least worn first.

    Their number follows the host's writes, so that wear leveling adds a bounded share of writes.
    """
    counts, c = store.nand.erase_count, store.counters
    due = (c.data // DATA_PAGES - c.levelled) // store.geometry.pages_per_block
    if due <= 0 or store.placement.free_blocks < 2 * store.reserve + store.geometry.channels:
        return []  # moving needs free blocks; retry later
    cold = np.flatnonzero((counts < int(counts.max()) - SPREAD) & (store.nand.bad == 0) & (store.nand.next_page > 0))
    best: list[int] = cold[np.argsort(counts[cold], kind="stable")][:due].tolist()
    return best
