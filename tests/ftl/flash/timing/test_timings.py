"""Timing models are an open set: a new one is a class and a line in the table.

partner of: ftl/flash/timing/model.py
"""

from dataclasses import replace

import numpy as np
import pytest

from csd_firmware import Firmware
from csd_spec import KvAppend, KvRead, SeqCreate, Status
from ftl import TIMINGS, FlashTiming
from ftl.flash.timing.calendar import FlashCalendar
from ftl.flash.timing.model import FlashOperation


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


@pytest.mark.parametrize("seed", range(3))
def test_operations_that_are_traced_end_as_if_they_were_not(small_drive, seed):
    g, generator = small_drive.geometry, np.random.default_rng(seed)
    plain, traced = (FlashCalendar(g, small_drive.timing) for _ in range(2))
    operations, heard = list[FlashOperation](), list[tuple[str, list[int], int]]()
    traced.tracer, traced.listener = operations.append, lambda *what: heard.append((what[0], what[1].tolist(), what[2]))
    start_ns = programmed_ns = 0
    for _ in range(20):
        start_ns += int(generator.integers(0, 300_000))
        ppns = generator.integers(0, g.pages, generator.integers(1, 6)).astype(np.uint32)
        nbytes, reads = generator.integers(1, 513, ppns.size), bool(generator.integers(2))
        operations.clear()
        free_ns = max(start_ns, int(traced.lane_free[ppns[0] % g.lanes]))
        if reads:
            end_ns = plain.read(ppns, nbytes, start_ns)
            assert traced.read(ppns, nbytes, start_ns) == end_ns
        else:
            end_ns = plain.program(ppns, start_ns)
            assert traced.program(ppns, start_ns) == end_ns
            programmed_ns = max(programmed_ns, end_ns)
        assert heard.pop() == ("read" if reads else "program", ppns.tolist(), start_ns)
        assert [operation.ppn for operation in operations] == ppns.tolist()
        assert [operation.nbytes for operation in operations] == (
            nbytes.tolist() if reads else [g.page_bytes] * ppns.size
        )
        assert {operation.kind for operation in operations} == {"read" if reads else "program"}
        assert operations[0].begin_ns == free_ns and max(operation.end_ns for operation in operations) == end_ns
        assert all(start_ns <= operation.begin_ns < operation.end_ns for operation in operations)
        assert (plain.lane_free == traced.lane_free).all() and plain.programmed_ns == programmed_ns


def test_unknown_timing_model_is_refused(small_drive):
    with pytest.raises(ValueError, match=r"timing.model = 'moon': must be one of calendar"):
        Firmware(replace(small_drive, timing=replace(small_drive.timing, model="moon")))
