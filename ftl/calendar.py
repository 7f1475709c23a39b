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
USED_BITS = 20  # a cell is slot number << USED_BITS | bytes used

I64 = NDArray[np.int64]


@njit(inline="always")
def _transfer(start, nbytes, slot_bytes, byte_ns, channel, cells, full):  # type: ignore[no-untyped-def]
    """Book bytes on a channel from `start` on; returns the end. Slots in full[channel], a range, are known as full."""
    slot = start // SLOT_NS
    if full[channel, 0] <= slot < full[channel, 1]:
        slot = full[channel, 1]
    left, used = nbytes, 0
    while True:
        cell = cells[channel, slot % SLOTS]
        if cell >> USED_BITS < slot:
            cell = slot << USED_BITS
        used = cell & ((1 << USED_BITS) - 1)
        taken = min(left, slot_bytes - used)
        used += taken
        left -= taken
        cells[channel, slot % SLOTS] = cell + taken
        if used == slot_bytes:
            if full[channel, 0] <= slot <= full[channel, 1]:
                full[channel, 1] = max(full[channel, 1], slot + 1)
            elif slot > full[channel, 1]:
                full[channel, 0], full[channel, 1] = slot, slot + 1
        if left == 0:
            break
        slot += 1
    # No transfer is faster than the channel, whatever part of its first slot was free
    return max(slot * SLOT_NS + _ceil_ns(used, byte_ns), start + _ceil_ns(nbytes, byte_ns))


@njit(inline="always")
def _ceil_ns(nbytes, byte_ns):  # type: ignore[no-untyped-def]
    """Time of bytes, given one byte's in 2^-32 ns: a division for each page would cost more than all the rest."""
    return (nbytes * byte_ns + 0xFFFFFFFF) >> 32


@njit(cache=True, nogil=True, error_model="numpy")
def _read(ppns, nbytes, start, channels, read_ns, cached, slot_bytes, byte_ns, lane_free, cells, full):  # type: ignore[no-untyped-def]
    finish, lanes = start, np.uint32(lane_free.size)
    for i in range(ppns.size):
        lane = ppns[i] % lanes
        channel = lane % np.uint32(channels)
        sensed = max(start, lane_free[lane]) + read_ns
        end = _transfer(sensed, nbytes[i], slot_bytes, byte_ns, channel, cells, full)
        # The page register is busy until its data has left, unless a cache register takes it over
        lane_free[lane] = sensed if cached else end
        finish = max(finish, end)
    return finish


@njit(cache=True, nogil=True, error_model="numpy")
def _program(ppns, nbytes, start, channels, program_ns, slot_bytes, byte_ns, lane_free, cells, full):  # type: ignore[no-untyped-def]
    finish, lanes = start, lane_free.size
    for i in range(ppns.size):
        lane = ppns[i] % lanes
        channel = lane % channels
        begin = max(start, lane_free[lane])
        loaded = _transfer(begin, nbytes, slot_bytes, byte_ns, channel, cells, full)
        lane_free[lane] = loaded + program_ns
        finish = max(finish, lane_free[lane])
    return finish


class FlashCalendar:
    """When flash operations end. Time in, time out, in integer nanoseconds of modelled time."""

    def __init__(self, geometry: Geometry, timing: NandTiming) -> None:
        self.geometry, self.timing = geometry, timing
        self.slot_bytes = timing.channel_bytes_per_s * SLOT_NS // 1_000_000_000
        if not 0 < self.slot_bytes < 1 << USED_BITS:
            raise ValueError(f"channel_bytes_per_s = {timing.channel_bytes_per_s}: beyond what a calendar holds")
        self._byte_ns = (SLOT_NS << 32) // self.slot_bytes
        self.lane_free: I64 = np.zeros(geometry.lanes, np.int64)
        self._cells: I64 = np.zeros((geometry.channels, SLOTS), np.int64)
        self._full: I64 = np.zeros((geometry.channels, 2), np.int64)

    def read(self, ppns: NDArray[np.uint32], nbytes: I64, start_ns: int) -> int:
        """Sense pages and bring nbytes (N,) of each over its channel; returns the last end."""
        t = self.timing
        shared = self.slot_bytes, self._byte_ns, self.lane_free, self._cells, self._full
        return int(_read(ppns, nbytes, start_ns, self.geometry.channels, t.read_ns, t.cache_read, *shared))

    def program(self, ppns: NDArray[np.uint32], start_ns: int) -> int:
        """Load and program whole pages; returns the last end."""
        g = self.geometry
        shared = self.slot_bytes, self._byte_ns, self.lane_free, self._cells, self._full
        return int(_program(ppns, g.page_bytes, start_ns, g.channels, self.timing.program_ns, *shared))

    def erase(self, lane: int, start_ns: int) -> int:
        """Erase one block of a lane; returns the end."""
        self.lane_free[lane] = max(start_ns, int(self.lane_free[lane])) + self.timing.erase_ns
        return int(self.lane_free[lane])

    def idle_ns(self) -> int:
        """When every lane is idle."""
        return int(self.lane_free.max())
