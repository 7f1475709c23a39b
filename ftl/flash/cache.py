"""Page cache in drive DRAM: pages that are read often skip the channel transfer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from csd_io.compiled import njit
from csd_spec.arrays import U32
from ftl.flash.memory import reserve_zeros

AGING_ROUNDS = 64  # turns of the clock hand after which all access counts are halved
_RESIDENT, _MAX_COUNT = 0x80, 0x7F


@njit(cache=True, nogil=True)
def _touch(ppns, state, ring, filled, hand, missed):  # type: ignore[no-untyped-def]
    """Find pages that miss; a missing page replaces the next victim of the ring if it was accessed more often.

    Args:
        state: Access count and residency flag of every page, (pages,) uint8.
        ring: Resident pages in replacement order.
        missed: Output, (P,) bool.

    Returns:
        Pages in the ring, and the position of the clock hand.
    """
    for i in range(ppns.size):
        page = ppns[i]
        count = min((state[page] & _MAX_COUNT) + 1, _MAX_COUNT)
        missed[i] = state[page] & _RESIDENT == 0
        state[page] = state[page] & _RESIDENT | count
        if not missed[i]:
            continue
        if filled < ring.size:
            ring[filled] = page
            state[page] |= _RESIDENT
            filled += 1
            continue
        victim = ring[hand % ring.size]
        if state[victim] & _RESIDENT == 0 or state[victim] & _MAX_COUNT < count:
            state[victim] &= _MAX_COUNT
            state[page] |= _RESIDENT
            ring[hand % ring.size] = page
        hand += 1
        if hand % (AGING_ROUNDS * ring.size) == 0:
            for other in ring:
                state[other] = state[other] & _RESIDENT | (state[other] & _MAX_COUNT) >> 1
    return filled, hand


class FlashPageCache:
    """Set of at most `capacity` out of `pages` flash pages that are cached in drive DRAM: the most frequently read.

    Attention reads the cache cyclically, so LRU would evict every page just before its next use. Access counts decay,
    so pages that are no longer hot are evicted eventually.
    """

    def __init__(self, capacity: int, pages: int) -> None:
        self.capacity, self._filled, self._hand = capacity, 0, 0
        self._state = reserve_zeros((pages if capacity else 0,), np.uint8)
        self._ring: U32 = np.zeros(capacity, np.uint32)

    def touch(self, ppns: U32) -> NDArray[np.bool_]:
        """Return which of the pages (P,) miss; pages that are read often enough become resident."""
        missed = np.ones(ppns.size, np.bool_)
        if self.capacity:
            self._filled, self._hand = _touch(ppns, self._state, self._ring, self._filled, self._hand, missed)
            assert self._filled <= self.capacity
        return missed

    @property
    def resident(self) -> U32:
        """Pages in the ring, including pages that were dropped by `forget`."""
        return self._ring[: self._filled]

    def holds(self, ppns: U32) -> NDArray[np.bool_]:
        """Return which of the pages (P,) are resident."""
        there: NDArray[np.bool_] = (
            self._state[ppns] & _RESIDENT != 0 if self.capacity else np.zeros(ppns.size, np.bool_)
        )
        return there

    def forget(self, ppns: U32) -> None:
        """Drop pages that now hold other data."""
        if self.capacity:
            self._state[ppns] = 0
