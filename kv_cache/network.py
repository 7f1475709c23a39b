"""Links under load: bytes of several copies at once, at rates that change when others come and go."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kv_cache.events import Events
from kv_cache.hardware import Link

Done = Callable[[], None]


@dataclass(slots=True)
class _Flow:
    left: float  # bytes
    urgency: float
    done: Done
    rate: float = 0.0


class Network:
    """The links of a machine."""

    def __init__(self, events: Events, links: Mapping[str, Link]) -> None:
        self.events = events
        self._loaded = {name: _Loaded(link) for name, link in links.items()}
        self._edition = 0

    def send(self, name: str, nbytes: int, done: Done, urgency: float = 0.0) -> None:
        """Let a piece pass a link; `done` is called when it has."""
        loaded = self._loaded[name]
        if not loaded.link.fifo:
            self._start(loaded, nbytes, urgency, done)
            return
        loaded.asked += 1
        heapq.heappush(loaded.waiting, (-urgency, loaded.asked, nbytes, done))
        if not loaded.blocks_at:
            self._next(loaded)

    def queued_bytes(self, name: str) -> float:
        """Bytes that are under way on a link, or wait for it."""
        self._advance()
        loaded = self._loaded[name]
        return sum(flow.left for flow in loaded.flows) + sum(each[2] for each in loaded.waiting)

    def busy_ns(self) -> dict[str, int]:
        """How long each link has moved bytes."""
        return {name: loaded.busy_ns for name, loaded in self._loaded.items()}

    def _next(self, loaded: _Loaded) -> None:
        """Give a link that goes in turn to the most urgent of those that wait."""
        loaded.blocks_at = bool(loaded.waiting)
        if loaded.waiting:
            urgency, _, nbytes, done = heapq.heappop(loaded.waiting)

            def left() -> None:
                self._next(loaded)
                done()

            self._start(loaded, nbytes, -urgency, left)

    def _start(self, loaded: _Loaded, nbytes: int, urgency: float, done: Done) -> None:
        start_ns = loaded.link.start_ns

        def flow() -> None:
            self._advance()
            loaded.flows.append(_Flow(nbytes, urgency, done))
            self._rerate()

        if start_ns:
            self.events.at(self.events.now_ns + start_ns, flow)
        else:
            flow()

    def _advance(self) -> None:
        """Let bytes pass at the rates that there were."""
        now_ns = self.events.now_ns
        for loaded in self._loaded.values():
            if loaded.flows and now_ns > loaded.since_ns:
                for flow in loaded.flows:
                    flow.left -= flow.rate * (now_ns - loaded.since_ns) / 1e9
                loaded.busy_ns += now_ns - loaded.since_ns
            loaded.since_ns = now_ns

    def _rerate(self) -> None:
        """Share the links among the most urgent of what is under way, and look again when the first of it ends."""
        busy = {name for name, loaded in self._loaded.items() if loaded.flows}
        first_ns: int | None = None
        for name in busy:
            loaded = self._loaded[name]
            share = min((rest for other, rest in loaded.link.contention.items() if other in busy), default=1.0)
            most = max(flow.urgency for flow in loaded.flows)
            served = [flow for flow in loaded.flows if flow.urgency == most]
            rate = loaded.link.bytes_per_s * share / len(served)
            for flow in loaded.flows:
                flow.rate = rate if flow.urgency == most else 0.0
            least = max(0.0, min(flow.left for flow in served))
            ends_ns = self.events.now_ns + -int(-least * 1e9 // rate)
            first_ns = ends_ns if first_ns is None else min(first_ns, ends_ns)
        self._edition += 1
        if first_ns is not None:
            edition = self._edition
            self.events.at(first_ns, lambda: self._look(edition))

    def _look(self, edition: int) -> None:
        """End what has passed; an older look is of no use, rates have changed since."""
        if edition != self._edition:
            return
        self._advance()
        ended = []
        for loaded in self._loaded.values():
            over = [flow for flow in loaded.flows if flow.left <= flow.rate / 1e9]  # less than a nanosecond of it
            if over:
                loaded.flows = [flow for flow in loaded.flows if flow not in over]
                ended += over
        self._rerate()
        for flow in ended:
            flow.done()


class _Loaded:
    """A link and what is on it."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.flows: list[_Flow] = []
        self.since_ns = self.busy_ns = 0
        self.waiting: list[tuple[float, int, int, Done]] = []
        self.blocks_at, self.asked = False, 0
