"""Event queue in float nanoseconds: rounding each of many copies to whole ns would accumulate an error."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Events:
    """Pending events in order of time; events of the same time run in order of insertion."""

    def __init__(self) -> None:
        self.now_ns = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, ns: float, act: Callable[[], None]) -> None:
        """Schedule an event; times in the past become now."""
        self._count += 1
        heapq.heappush(self._queue, (max(ns, self.now_ns), self._count, act))

    @property
    def next_ns(self) -> float | None:
        """Time of the next event; None if the queue is empty."""
        return self._queue[0][0] if self._queue else None

    def run_to(self, ns: float) -> None:
        """Run all events up to a time."""
        while self._queue and self._queue[0][0] <= ns:
            self._next()
        self.now_ns = max(self.now_ns, ns)

    def run_until(self, over: Callable[[], bool]) -> None:
        """Run events until `over` is true; raises RuntimeError if the queue runs empty first."""
        while not over():
            if not self._queue:
                raise RuntimeError("simulation deadlock: the event queue is empty while transfers are pending")
            self._next()

    def _next(self) -> None:
        ns, _, act = heapq.heappop(self._queue)
        assert ns >= self.now_ns, f"an event of {ns} ns runs at {self.now_ns} ns"
        self.now_ns = ns
        act()
