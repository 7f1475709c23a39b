"""Flash timing: a lane runs one sense or program at a time; channels are shared through a calendar.

A channel's calendar is divided into time slots, each with the bytes that the channel moves in it. A transfer takes the
free bytes from its earliest slot on, so a transfer far in the future, after a slow sense, leaves the channel free for
earlier ones. (A single "busy until" time, in order of arrival, would block them.) Nothing is booked after a channel's
last run of full slots, so most transfers just extend that run without visiting a slot.
"""

from __future__ import annotations

import numpy as np

from csd_io.compiled import njit
from csd_spec import Geometry, NandTiming
from csd_spec.arrays import I64, U32
from ftl.flash.timing.model import FlashTiming, Reading

SLOT_NS = 4_000
SLOTS = 1 << 16  # 262 ms ahead of the earliest open request
USED_BITS = 20  # a cell is slot number << USED_BITS | bytes used
_USED = (1 << USED_BITS) - 1


@njit(inline="always")
def _ceil_ns(nbytes, byte_ns):  # type: ignore[no-untyped-def]
    """Transfer time of bytes, given the time of one byte in 2^-32 ns; avoids a division per page."""
    return (nbytes * byte_ns + 0xFFFFFFFF) >> 32


@njit(cache=True, nogil=True, error_model="numpy")
def occupy(ppns, nbytes, start, channels, before_ns, after_ns, cached, slot_bytes, byte_ns, lane_free, cells, runs):  # type: ignore[no-untyped-def]
    """Book pages in order: before_ns on the lane, the transfer on the channel, then after_ns on the lane."""
    finish, lanes = start, np.uint32(lane_free.size)
    per_byte = (1 << 40) // slot_bytes + 1  # slots, in 2^-40
    for i in range(ppns.size):
        lane = ppns[i] % lanes
        channel = lane % np.uint32(channels)
        begin = max(start, lane_free[lane]) + before_ns
        slot, left, slot_used = begin // SLOT_NS, nbytes[i], 0
        first, last, used = runs[channel, 0], runs[channel, 1], runs[channel, 2]
        if slot > last:
            for full in range(max(first, last - SLOTS), last):
                cells[channel, full % SLOTS] = full << USED_BITS | slot_bytes
            cells[channel, last % SLOTS] = last << USED_BITS | used
            first, last, used = slot, slot, 0
            runs[channel, 0] = first
        while slot < first and left:
            cell = cells[channel, slot % SLOTS]
            if cell >> USED_BITS < slot:
                cell = slot << USED_BITS
            taken = min(left, slot_bytes - (cell & _USED))
            left -= taken
            cells[channel, slot % SLOTS] = cell + taken
            slot_used = (cell + taken) & _USED
            slot += 1
        if left:
            used += left
            more = (used - 1) * per_byte >> 40
            last += more
            used -= more * slot_bytes
            runs[channel, 1], runs[channel, 2] = last, used
            slot, slot_used = last, used
        else:
            slot -= 1
        # The channel bounds the transfer rate, whatever part of the first slot was free
        end = max(slot * SLOT_NS + _ceil_ns(slot_used, byte_ns), begin + _ceil_ns(nbytes[i], byte_ns)) + after_ns
        # The page register is busy until its data has left, unless a cache register takes over
        lane_free[lane] = begin if cached else end
        finish = max(finish, end)
    return finish


class FlashCalendar(FlashTiming):
    """One calendar per channel, and the time at which each lane is free."""

    grain_ns = SLOT_NS

    def __init__(self, geometry: Geometry, timing: NandTiming) -> None:
        self.geometry, self.timing, self.page_bytes = geometry, timing, geometry.page_bytes
        self.slot_bytes = timing.channel_bytes_per_s * SLOT_NS // 1_000_000_000
        if not 0 < self.slot_bytes <= _USED:
            raise ValueError(f"channel_bytes_per_s = {timing.channel_bytes_per_s}: beyond what a calendar holds")
        self._byte_ns = (SLOT_NS << 32) // self.slot_bytes
        self.lane_free: I64 = np.zeros(geometry.lanes, np.int64)
        self._cells: I64 = np.zeros((geometry.channels, SLOTS), np.int64)
        # Last run of each channel: first slot, last slot, bytes used in the last slot. Cells of a run are written when
        # the next run begins.
        self._runs: I64 = np.zeros((geometry.channels, 3), np.int64)
        self._state = self.slot_bytes, self._byte_ns, self.lane_free, self._cells, self._runs
        self._reading = geometry.channels, timing.read_ns, 0, timing.cache_read, *self._state

    @property
    def reading(self) -> Reading:
        return self._reading

    def read_ends(self, ppns: U32, nbytes: I64, start_ns: int) -> int:
        return int(occupy(ppns, nbytes, start_ns, *self._reading))

    def program_ends(self, ppns: U32, start_ns: int) -> int:
        nbytes = np.full(ppns.size, self.geometry.page_bytes)
        times = 0, self.timing.program_ns, False
        return int(occupy(ppns, nbytes, start_ns, self.geometry.channels, *times, *self._state))

    def erase(self, lane: int, start_ns: int) -> int:
        self.lane_free[lane] = max(start_ns, int(self.lane_free[lane])) + self.timing.erase_ns
        self.programmed_ns = max(self.programmed_ns, int(self.lane_free[lane]))
        return int(self.lane_free[lane])

    def free_ns(self, ppns: U32) -> int:
        return int(self.lane_free[ppns % np.uint32(self.lane_free.size)].max(initial=0))

    def idle_ns(self) -> int:
        return int(self.lane_free.max())
