"""A queue of events in nanoseconds, with fractions: over many copies whole ones would add up to a difference."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Events:
    """What happens when, in the order of time, and of asking among equals."""

    def __init__(self) -> None:
        self.now_ns = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, ns: float, act: Callable[[], None]) -> None:
        """Let something happen at a time that is not over."""
        self._count += 1
        heapq.heappush(self._queue, (max(ns, self.now_ns), self._count, act))

    @property
    def next_ns(self) -> float | None:
        """When the next thing happens; None where nothing is left to."""
        return self._queue[0][0] if self._queue else None

    def run_to(self, ns: float) -> None:
        """Let everything happen that does up to a time."""
        while self._queue and self._queue[0][0] <= ns:
            self._next()
        self.now_ns = max(self.now_ns, ns)

    def run_until(self, over: Callable[[], bool]) -> None:
        """Let things happen until a condition holds; raises RuntimeError where it never does."""
        while not over():
            if not self._queue:
                raise RuntimeError("nothing is left to happen, and somebody still waits")
            self._next()

    def _next(self) -> None:
        self.now_ns, _, act = heapq.heappop(self._queue)
        act()
