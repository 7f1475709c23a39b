"""partner of: kv_cache/network.py, kv_cache/events.py"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache.events import Events
from kv_cache.hardware import SharedLink
from kv_cache.network import LinkNetwork

GB = 10**9


class Bench:
    """Links, and when what was sent over them arrived."""

    def __init__(self, *links: SharedLink) -> None:
        self.events = Events()
        self.network = LinkNetwork(self.events, {link.name: link for link in links})
        self.arrived: dict[str, int] = {}

    def send(self, name: str, link: str, nbytes: int, at_ns: int = 0, urgency: float = 0.0) -> None:
        def arrive() -> None:
            self.arrived[name] = self.events.now_ns

        self.events.at(at_ns, lambda: self.network.send(link, nbytes, arrive, urgency))

    def run(self) -> dict[str, int]:
        while (next_ns := self.events.next_ns) is not None:
            self.events.run_to(next_ns)
        return self.arrived


def test_shared_link_is_divided_evenly() -> None:
    bench = Bench(SharedLink("a", 1 * GB))
    bench.send("long", "a", 1000)
    bench.send("short", "a", 200, at_ns=400)
    # 400 ns alone, then half the rate each: short ends after 400 more, long has 400 left and the link for itself
    assert bench.run() == {"short": 800, "long": 1200}


def test_fifo_link_serves_urgent_transfers_first() -> None:
    bench = Bench(SharedLink("a", 1 * GB, start_ns=10, fifo=True))
    for name, urgency in (("first", 0.0), ("late", 0.0), ("urgent", 1.0)):
        bench.send(name, "a", 100, urgency=urgency)
    assert bench.run() == {"first": 110, "urgent": 220, "late": 330}


def test_urgent_transfer_gets_shared_link_alone() -> None:
    bench = Bench(SharedLink("a", 1 * GB))
    bench.send("first", "a", 300)
    bench.send("urgent", "a", 100, at_ns=100, urgency=1.0)
    assert bench.run() == {"urgent": 200, "first": 400}


def test_start_time_is_charged_once_per_piece() -> None:
    bench = Bench(SharedLink("a", 1 * GB, start_ns=50))
    bench.send("x", "a", 100)
    bench.send("y", "a", 100)
    assert bench.run() == {"x": 250, "y": 250}


def test_busy_link_slows_contending_link() -> None:
    bench = Bench(SharedLink("read", 1 * GB, contention={"write": 0.25}), SharedLink("write", 1 * GB))
    bench.send("read", "read", 1000)
    bench.send("write", "write", 400, at_ns=100)
    # 100 bytes, then 400 ns at a quarter, then the 800 that are left
    assert bench.run() == {"write": 500, "read": 1300}


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 5000)), min_size=1, max_size=12))
def test_links_keep_their_rate_and_never_idle(sent: list[tuple[int, int]]) -> None:
    bench = Bench(SharedLink("a", 1 * GB))
    for number, (at_ns, nbytes) in enumerate(sent):
        bench.send(str(number), "a", nbytes, at_ns)
    arrived = bench.run()
    busy_ns, free_ns = 0, 0
    for at_ns, nbytes in sorted(sent):  # a link that is never idle with pending work finishes when a single queue would
        free_ns = max(free_ns, at_ns) + nbytes
        busy_ns += nbytes
    assert max(arrived.values()) == pytest.approx(free_ns, abs=len(sent) + 1)
    assert bench.network.busy_ns()["a"] == pytest.approx(busy_ns, abs=2 * len(sent) + 2)
    for number, (at_ns, nbytes) in enumerate(sent):
        assert arrived[str(number)] >= at_ns + nbytes


def test_wait_without_events_is_a_deadlock_error() -> None:
    with pytest.raises(RuntimeError, match="simulation deadlock"):
        Events().run_until(lambda: False)
