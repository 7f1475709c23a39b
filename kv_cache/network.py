"""Simulated links: concurrent copies share bandwidth, and rates change when copies start and finish."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kv_cache.events import Events
from kv_cache.hardware import SharedLink

Done = Callable[[], None]


@dataclass(slots=True, eq=False)
class _Flow:
    left: float  # bytes
    urgency: float
    done: Done
    rate: float = 0.0


class LinkNetwork:
    """The links of a machine and the pieces on them."""

    def __init__(self, events: Events, links: Mapping[str, SharedLink]) -> None:
        self.events = events
        self._loaded = {name: _LinkState(link) for name, link in links.items()}
        for loaded in self._loaded.values():
            for name in loaded.link.contention:
                self._loaded[name].slows.append(loaded)

    def send(self, name: str, nbytes: int, done: Done, urgency: float = 0.0) -> None:
        """Send a piece over a link; `done` is called at its end."""
        loaded = self._loaded[name]
        if not loaded.link.fifo:
            self._start(loaded, nbytes, urgency, done)
            return
        loaded.asked += 1
        heapq.heappush(loaded.waiting, (-urgency, loaded.asked, nbytes, done))
        if not loaded.blocks_at:
            self._next(loaded)

    def queued_bytes(self, name: str) -> float:
        """Bytes in flight on a link or queued for it."""
        loaded = self._loaded[name]
        self._advance(loaded)
        return sum(flow.left for flow in loaded.flows) + sum(nbytes for _, _, nbytes, _ in loaded.waiting)

    def busy_ns(self) -> dict[str, float]:
        """Busy time of each link, ns."""
        return {name: loaded.busy_ns for name, loaded in self._loaded.items()}

    def _next(self, loaded: _LinkState) -> None:
        """Start the queued piece of highest priority on a FIFO link."""
        loaded.blocks_at = bool(loaded.waiting)
        if loaded.waiting:
            urgency, _, nbytes, done = heapq.heappop(loaded.waiting)

            def left() -> None:
                self._next(loaded)
                done()

            self._start(loaded, nbytes, -urgency, left)

    def _start(self, loaded: _LinkState, nbytes: int, urgency: float, done: Done) -> None:
        link = loaded.link
        start_ns, overhead = link.start_ns, link.overhead_ns * link.bytes_per_s / 1e9

        def flow() -> None:
            self._advance(loaded)
            assert not (link.fifo and loaded.flows), "a FIFO link has two pieces"
            loaded.flows.append(_Flow(nbytes + overhead, urgency, done))
            self._rerate(loaded)

        if start_ns:
            self.events.at(self.events.now_ns + start_ns, flow)
        else:
            flow()

    def _advance(self, loaded: _LinkState) -> None:
        """Advance the pieces of a link to the present at their current rates."""
        now_ns = self.events.now_ns
        assert now_ns >= loaded.since_ns
        if loaded.flows and now_ns > loaded.since_ns:
            for flow in loaded.flows:
                flow.left -= flow.rate * (now_ns - loaded.since_ns) / 1e9
            loaded.busy_ns += now_ns - loaded.since_ns
        loaded.since_ns = now_ns

    def _rerate(self, loaded: _LinkState) -> None:
        """Recompute the rates of a link whose pieces changed, and of the links that it slows."""
        self._share(loaded)
        if loaded.busy != bool(loaded.flows):
            loaded.busy = bool(loaded.flows)
            for other in loaded.slows:
                self._advance(other)
                self._share(other)

    def _share(self, loaded: _LinkState) -> None:
        """Share a link among its pieces of highest priority; schedule an event at the end of the first of them."""
        loaded.edition += 1
        if not loaded.flows:
            return
        link, edition = loaded.link, loaded.edition
        left = min((rest for other, rest in link.contention.items() if self._loaded[other].flows), default=1.0)
        most = max(flow.urgency for flow in loaded.flows)
        served = [flow for flow in loaded.flows if flow.urgency == most]
        rate = link.bytes_per_s * left / len(served)
        for flow in loaded.flows:
            flow.rate = rate if flow.urgency == most else 0.0
        least = max(0.0, min(flow.left for flow in served))
        self.events.at(self.events.now_ns + least * 1e9 / rate, lambda: self._finish_flows(loaded, edition))

    def _finish_flows(self, loaded: _LinkState, edition: int) -> None:
        """Finish transferred pieces; an event from before the last change of rates does nothing."""
        if edition != loaded.edition:
            return
        self._advance(loaded)
        over = [flow for flow in loaded.flows if flow.left <= flow.rate / 1e9]  # less than 1 ns of transfer time left
        loaded.flows = [flow for flow in loaded.flows if flow not in over]
        self._rerate(loaded)
        for flow in over:
            flow.done()


class _LinkState:
    """A link and the pieces on it."""

    def __init__(self, link: SharedLink) -> None:
        self.link = link
        self.flows: list[_Flow] = []
        self.since_ns = self.busy_ns = 0.0
        self.waiting: list[tuple[float, int, int, Done]] = []
        self.blocks_at, self.asked = False, 0
        self.busy, self.edition = False, 0
        self.slows: list[_LinkState] = []
