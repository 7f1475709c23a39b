"""Pages that are read often, kept in drive DRAM: what is there need not cross a channel."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from csd_io.compiled import njit
from csd_spec.arrays import U32
from ftl.flash.memory import lazy_zeros

ROUNDS = 64  # of the hand over the cache, after which everything in it counts half
_THERE, _MOST = 0x80, 0x7F


@njit(cache=True, nogil=True)
def _touch(ppns, state, ring, filled, hand, missed):  # type: ignore[no-untyped-def]
    """Which pages are not there; each takes the place of the next in turn if it was asked for more often.

    state: how often each page was asked for, and whether it is there. Returns the pages in the ring and the hand.
    """
    for i in range(ppns.size):
        page = ppns[i]
        count = min((state[page] & _MOST) + 1, _MOST)
        missed[i] = state[page] & _THERE == 0
        state[page] = state[page] & _THERE | count
        if not missed[i]:
            continue
        if filled < ring.size:
            ring[filled] = page
            state[page] |= _THERE
            filled += 1
            continue
        victim = ring[hand % ring.size]
        if state[victim] & _THERE == 0 or state[victim] & _MOST < count:
            state[victim] &= _MOST
            state[page] |= _THERE
            ring[hand % ring.size] = page
        hand += 1
        if hand % (ROUNDS * ring.size) == 0:
            for other in ring:
                state[other] = state[other] & _THERE | (state[other] & _MOST) >> 1
    return filled, hand


class PageCache:
    """Which of `pages` flash pages are in drive DRAM, at most `capacity`: those that were asked for most often.

    Attention goes round: a cache of what was read last would forget every page just before it is read again. What is
    there ages, so that what was hot once goes in the end.
    """

    def __init__(self, capacity: int, pages: int) -> None:
        self.capacity, self._filled, self._hand = capacity, 0, 0
        self._state = lazy_zeros((pages if capacity else 0,), np.uint8)
        self._ring: U32 = np.zeros(capacity, np.uint32)

    def touch(self, ppns: U32) -> NDArray[np.bool_]:
        """Which of these pages (P,) have to be read; what is worth it is in the cache from now on."""
        missed = np.ones(ppns.size, np.bool_)
        if self.capacity:
            self._filled, self._hand = _touch(ppns, self._state, self._ring, self._filled, self._hand, missed)
        return missed

    @property
    def kept(self) -> U32:
        """The pages of the ring, those among them that were forgotten too."""
        return self._ring[: self._filled]

    def holds(self, ppns: U32) -> NDArray[np.bool_]:
        """Which of these pages (P,) are in the cache."""
        there: NDArray[np.bool_] = self._state[ppns] & _THERE != 0 if self.capacity else np.zeros(ppns.size, np.bool_)
        return there

    def forget(self, ppns: U32) -> None:
        """These pages hold something else from now on."""
        if self.capacity:
            self._state[ppns] = 0
