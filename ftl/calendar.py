"""Modelled time of flash: lanes sense and program one thing at a time, channels are shared by calendar.

A channel's calendar divides time into slots, each with as many bytes as the channel moves in it. A transfer takes
what is free from its earliest slot on, so one that is dated far ahead, behind a slow sense, leaves the channel free
for those before it. ("Busy until", kept in order of arrival, would let it block them.)
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from csd_spec import Geometry, NandTiming

SLOT_NS = 4_000
SLOTS = 1 << 16  # 262 ms ahead of the earliest request still open

I64 = NDArray[np.int64]


@njit(cache=True, nogil=True)
def _transfer(start, nbytes, slot_bytes, stamp, used, full):  # type: ignore[no-untyped-def]
    """Book `nbytes` on one channel from `start` on; returns the end. `full` = [lo, hi) holds slots known as full."""
    slot = start // SLOT_NS
    if full[0] <= slot < full[1]:
        slot = full[1]
    left = nbytes
    end = start
    while left > 0:
        at = slot % SLOTS
        if stamp[at] < slot:
            stamp[at], used[at] = slot, 0
        free = slot_bytes - used[at] if stamp[at] == slot else slot_bytes
        taken = min(left, free)
        if taken > 0 and stamp[at] == slot:
            used[at] += taken
            end = slot * SLOT_NS + (used[at] * SLOT_NS + slot_bytes - 1) // slot_bytes
        elif taken > 0:
            end = (slot + 1) * SLOT_NS
        left -= taken
        if free == taken:
            if full[0] <= slot <= full[1]:
                full[1] = max(full[1], slot + 1)
            elif slot > full[1]:
                full[0], full[1] = slot, slot + 1
        slot += 1
    return max(end, start + (nbytes * SLOT_NS + slot_bytes - 1) // slot_bytes)


@njit(cache=True, nogil=True)
def _read(ppns, nbytes, start, lanes, channels, read_ns, slot_bytes, lane_free, stamp, used, full):  # type: ignore[no-untyped-def]
    finish = start
    for i in range(ppns.size):
        lane = ppns[i] % lanes
        channel = lane % channels
        sensed = max(start, lane_free[lane]) + read_ns
        end = _transfer(sensed, nbytes[i], slot_bytes, stamp[channel], used[channel], full[channel])
        lane_free[lane] = end  # the page register is busy until its data has left
        finish = max(finish, end)
    return finish


@njit(cache=True, nogil=True)
def _program(ppns, nbytes, start, lanes, channels, program_ns, slot_bytes, lane_free, stamp, used, full):  # type: ignore[no-untyped-def]
    finish = start
    for i in range(ppns.size):
        lane = ppns[i] % lanes
        channel = lane % channels
        begin = max(start, lane_free[lane])
        loaded = _transfer(begin, nbytes, slot_bytes, stamp[channel], used[channel], full[channel])
        lane_free[lane] = loaded + program_ns
        finish = max(finish, lane_free[lane])
    return finish


class FlashCalendar:
    """When flash operations end. Time in, time out, in integer nanoseconds of modelled time."""

    def __init__(self, geometry: Geometry, timing: NandTiming) -> None:
        self.geometry, self.timing = geometry, timing
        self.slot_bytes = timing.channel_bytes_per_s * SLOT_NS // 1_000_000_000
        self.lane_free: I64 = np.zeros(geometry.lanes, np.int64)
        self._stamp: I64 = np.full((geometry.channels, SLOTS), -1, np.int64)
        self._used: I64 = np.zeros((geometry.channels, SLOTS), np.int64)
        self._full: I64 = np.zeros((geometry.channels, 2), np.int64)

    def read(self, ppns: NDArray[np.uint32], nbytes: I64, start_ns: int) -> int:
        """Sense pages and bring the first `nbytes` (N,) of each over its channel; returns the last end."""
        g = self.geometry
        return int(
            _read(
                ppns,
                nbytes,
                start_ns,
                g.lanes,
                g.channels,
                self.timing.read_ns,
                self.slot_bytes,
                self.lane_free,
                self._stamp,
                self._used,
                self._full,
            )
        )

    def program(self, ppns: NDArray[np.uint32], start_ns: int) -> int:
        """Load and program whole pages; returns the last end."""
        g = self.geometry
        return int(
            _program(
                ppns,
                g.page_bytes,
                start_ns,
                g.lanes,
                g.channels,
                self.timing.program_ns,
                self.slot_bytes,
                self.lane_free,
                self._stamp,
                self._used,
                self._full,
            )
        )

    def erase(self, start_ns: int) -> int:
        """Erase one block in every lane; returns the last end."""
        np.maximum(self.lane_free, start_ns, out=self.lane_free)
        self.lane_free += self.timing.erase_ns
        return int(self.lane_free.max())

    def idle_ns(self) -> int:
        """When every lane is idle."""
        return int(self.lane_free.max())
