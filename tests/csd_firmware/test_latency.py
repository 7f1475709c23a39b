"""Parts of the simulated time add up to the whole, and their names are of the closed set."""

from types import SimpleNamespace

import pytest

from csd_firmware.latency import LatencyBreakdown


def test_shares_of_units_add_up_to_latency():
    watch = LatencyBreakdown(100)
    watch.spend("link", 5)
    watch.until("queue", 90)  # already in the past
    watch.until("flash_token", 140)
    watch.spend("link", 2)
    assert watch.breakdown_ns == {"link": 7, "queue": 0, "flash_token": 35}
    assert (watch.now_ns, sum(watch.breakdown_ns.values())) == (142, 42)


def test_unknown_unit_is_refused():
    with pytest.raises(ValueError, match="unit 'mine'"):
        LatencyBreakdown(0).spend("mine", 1)


def test_times_of_no_length_are_not_traced():
    trace = SimpleNamespace(path=[])
    watch = LatencyBreakdown(100, trace)
    for ns in (0, 5, 0):
        watch.spend("link", ns)
    watch.until("queue", 90)
    assert [(part.unit, part.begin_ns, part.end_ns) for part in trace.path] == [("link", 100, 105)]
