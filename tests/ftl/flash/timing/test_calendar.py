"""Simulated time of flash against the limits of the geometry."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from csd_spec.presets import INSTCSD_ZYNQ7045_8CH as DRIVE
from ftl.flash.timing.calendar import SLOT_NS, FlashCalendar


def pages(count, lanes=DRIVE.geometry.lanes, first=0):
    return np.arange(first, first + count, dtype=np.uint32) % lanes


def read(calendar, ppns, start_ns=0):
    return calendar.read(ppns, np.full(ppns.size, 4096, np.int64), start_ns)


@pytest.fixture
def calendar():
    return FlashCalendar(DRIVE.geometry, DRIVE.timing)


TRANSFER_NS = 4096 * 10**9 // DRIVE.timing.channel_bytes_per_s


def test_one_page_is_sensed_and_transferred(calendar):
    assert read(calendar, pages(1), 1000) == pytest.approx(1000 + 50_000 + TRANSFER_NS, abs=2)


def test_one_lane_senses_one_page_at_a_time(calendar):
    assert read(calendar, np.zeros(3, np.uint32)) == pytest.approx(3 * (50_000 + TRANSFER_NS), abs=10)


def test_many_pages_run_at_channel_rate(calendar):
    count = 64 * DRIVE.geometry.lanes
    ideal = count * 4096 / (DRIVE.geometry.channels * DRIVE.timing.channel_bytes_per_s) * 1e9
    assert ideal < read(calendar, pages(count)) < 1.05 * ideal + 100_000


def test_one_channel_gets_an_eighth_of_the_bandwidth(calendar):
    count = 2048
    one = read(calendar, pages(count) // 8 * 8)
    spread = read(FlashCalendar(DRIVE.geometry, DRIVE.timing), pages(count))
    assert one > 6 * spread


def test_later_transfer_does_not_block_earlier_one(calendar):
    """The lane of page 0 is busy programming; page 8 shares its channel and must not wait for it."""
    calendar.program(np.zeros(1, np.uint32), 0)
    assert read(calendar, np.array([0], np.uint32)) > 600_000
    assert read(calendar, np.array([8], np.uint32)) < 70_000


def test_arrival_order_barely_changes_total_time():
    generator = np.random.default_rng(1)
    ppns = generator.integers(0, DRIVE.geometry.lanes, 5000).astype(np.uint32)
    ends = []
    for order in (np.arange(5000), generator.permutation(5000)):
        calendar = FlashCalendar(DRIVE.geometry, DRIVE.timing)
        ends.append(read(calendar, ppns[order]))
    assert ends[0] == pytest.approx(ends[1], rel=0.05)  # "busy until" differs by 23 to 30 %


@pytest.mark.parametrize("seed", range(4))
def test_transfers_end_as_in_a_plain_calendar(calendar, seed):
    """Reads and programs of random pages at random times, against a dictionary of slots."""
    generator, booked = np.random.default_rng(seed), defaultdict(int)
    g, t, free = DRIVE.geometry, DRIVE.timing, defaultdict(int)
    for _ in range(600):
        lane, nbytes = int(generator.integers(24)), int(generator.integers(1, 20_000))
        start = int(generator.integers(400_000))
        reading = generator.random() < 0.7
        begin = max(start, free[lane]) + (t.read_ns if reading else 0)
        slot, left = begin // SLOT_NS, nbytes if reading else g.page_bytes
        while left:
            taken = min(left, calendar.slot_bytes - booked[lane % g.channels, slot])
            booked[lane % g.channels, slot] += taken
            left, slot = left - taken, slot + 1
        rate = t.channel_bytes_per_s / 1e9
        end = (slot - 1) * SLOT_NS + booked[lane % g.channels, slot - 1] / rate
        end = max(end, begin + (nbytes if reading else g.page_bytes) / rate)
        page = np.array([lane], np.uint32)
        if reading:
            assert calendar.read(page, np.array([nbytes]), start) == pytest.approx(end, abs=3)
            free[lane] = calendar.lane_free[lane]
        else:
            free[lane] = calendar.program(page, start)
            assert free[lane] == pytest.approx(end + t.program_ns, abs=3)


def test_program_and_erase_times(calendar):
    assert calendar.program(pages(256), 0) == pytest.approx(600_000 + 32 * TRANSFER_NS, rel=0.01)
    assert calendar.erase(3, 10_000_000) == 15_000_000
    assert calendar.idle_ns() == 15_000_000


def test_reads_beyond_calendar_horizon_are_timed(calendar):
    late = 10 * (1 << 16) * SLOT_NS
    assert read(calendar, pages(1), late) == pytest.approx(late + 50_000 + TRANSFER_NS, abs=2)


def test_faster_channels_finish_sooner():
    fast = replace(DRIVE.timing, channel_bytes_per_s=2 * DRIVE.timing.channel_bytes_per_s)
    slow, quick = (read(FlashCalendar(DRIVE.geometry, t), pages(8192)) for t in (DRIVE.timing, fast))
    assert quick < 0.6 * slow


def test_listener_sees_every_page_and_changes_no_time(calendar):
    calendars, heard = [FlashCalendar(DRIVE.geometry, DRIVE.timing), calendar], []
    calendars[1].listener = lambda operation, ppns, start_ns: heard.append((operation, ppns.tolist(), start_ns))
    ends = [(each.read(pages(3), np.full(3, 100), 5), each.program(pages(1), 70)) for each in calendars]
    assert ends[0] == ends[1]
    assert heard == [("read", [0, 1, 2], 5), ("program", [0], 70)]
