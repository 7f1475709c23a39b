"""Timing models are an open set: a new one is a class and a line in the table.

partner of: ftl/flash/timing/model.py
"""

from dataclasses import replace

import numpy as np
import pytest

from csd_firmware import Firmware
from csd_spec import KvAppend, KvRead, SeqCreate, Status
from ftl import TIMINGS, FlashTiming


class Lanes(FlashTiming):
    """Lanes alone: a channel moves everything at once."""

    def __init__(self, geometry, timing):
        self.timing, self.free = timing, np.zeros(geometry.lanes, np.int64)

    def _each(self, ppns, start_ns, ns):
        for lane in (ppns % self.free.size).tolist():
            self.free[lane] = start_ns = max(start_ns, self.free[lane]) + ns
        return int(start_ns)

    def read_ends(self, ppns, nbytes, start_ns):
        return self._each(ppns, start_ns, self.timing.read_ns)

    def program_ends(self, ppns, start_ns):
        return self._each(ppns, start_ns, self.timing.program_ns)

    def erase(self, lane, start_ns):
        return self._each(np.array([lane]), start_ns, self.timing.erase_ns)

    def idle_ns(self):
        return int(self.free.max())


def test_custom_timing_model_times_whole_drive(small_drive, monkeypatch):
    monkeypatch.setitem(TIMINGS, "lanes", Lanes)
    drive = replace(small_drive, timing=replace(small_drive.timing, model="lanes"))
    firmware, rows = Firmware(drive), np.ones((200, 2, 16), np.float16)
    seqs = tuple(firmware.step(SeqCreate(1, 1, 2, 16, 512), 0).data[0].tolist())
    appended = firmware.step(KvAppend(seqs, 0, np.array([200]), rows, rows), 0)
    pages = appended.flash.pages_programmed
    assert appended.status is Status.SUCCESS and appended.breakdown_ns["flash_program"] % drive.timing.program_ns == 0
    read = firmware.step(KvRead(seqs, 0), appended.finish_ns)
    assert read.flash.pages_read * drive.timing.read_ns == read.breakdown_ns["flash_token"]
    assert pages > read.flash.pages_read > 0


def test_unknown_timing_model_is_refused(small_drive):
    with pytest.raises(ValueError, match=r"timing.model = 'moon': must be one of calendar"):
        Firmware(replace(small_drive, timing=replace(small_drive.timing, model="moon")))
