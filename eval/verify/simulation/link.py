"""A window with simulated delays between its ends: writes reach the other end late, twice, or not at all."""

from __future__ import annotations

import errno
import random
from collections import Counter, deque
from collections.abc import Callable

from csd_io.folder import Bytes
from csd_link.window import BLOCK_BYTES
from vcsd_eval.verify.simulation.disk import Killed

BLOCKS = 96
TORN_BYTES = 1000  # bytes of a torn block that arrive


class Clock:
    """Virtual seconds; replaces the module `time`. Each query advances the time slightly."""

    def __init__(self, pump: Callable[[], None]) -> None:
        self.now, self._pump = 0.0, pump

    def monotonic(self) -> float:
        self.now += 5e-5
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        """Run the other components in the meantime."""
        self.now += seconds
        self._pump()


class HostDied(BaseException):
    """The writing host was killed."""


class SimulatedLink:
    """Copies of a window's blocks at both ends, and writes in transit. Writes of one end stay in order.

    Attributes:
        rates: Rates of blocks that are late, duplicated, or lost with the path, and of torn payload blocks.
        deaths: Counts down with each write of the drive, or of the host; at 0 that end is killed during it.
    """

    def __init__(
        self, clock: Clock, draw: random.Random, rates: dict[str, float], hits: Counter[str], slots: int
    ) -> None:
        """slots: First block of payloads; those before it have a checksum each."""
        self.clock, self._draw, self._rates, self._hits, self._slots = clock, draw, rates, hits, slots
        self.copies: dict[str, dict[int, bytes]] = {"host": {}, "drive": {}}
        self._ways: dict[str, deque[tuple[float, int, bytes]]] = {"host": deque(), "drive": deque()}
        self.deaths = {"host": -1, "drive": -1}
        self.news = {"host": True, "drive": True}  # whether unread writes have arrived

    def write(self, end: str, block: int, data: bytes) -> None:
        """Write to this end's own copy at once, and send to the other end."""
        if self.deaths[end] == 0:
            self.deaths[end] = -1
            raise HostDied if end == "host" else Killed
        self.deaths[end] -= self.deaths[end] > 0
        self.copies[end][block] = data
        if end == "host" and self._draw.random() < self._rates["lost"]:
            self._hits["message lost"] += 1
            if self._draw.random() < 0.5:
                self._send(end, block, data)
            raise OSError(errno.EIO, "the path is lost", "window")
        self._send(end, block, data)
        if self._draw.random() < self._rates["doubled"]:
            self._hits["message doubled"] += 1
            self._send(end, block, data)

    def _send(self, end: str, block: int, data: bytes) -> None:
        way, arrives = self._ways[end], self.clock.now
        if block >= self._slots and self._draw.random() < self._rates["torn"]:
            self._hits["payload torn"] += 1
            data = data[:TORN_BYTES] + self._draw.randbytes(len(data) - TORN_BYTES)
        if self._draw.random() < self._rates["late"]:
            self._hits["message late"] += 1
            arrives += self._draw.random() ** 4 * 3
        way.append((max(arrives, way[-1][0] if way else 0.0), block, data))

    def deliver(self) -> None:
        """Apply all writes that have arrived by now."""
        for end, other in (("host", "drive"), ("drive", "host")):
            way = self._ways[end]
            while way and way[0][0] <= self.clock.now:
                _, block, data = way.popleft()
                self.copies[other][block] = data
                self.news[other] = True


class Side:
    """One end's view of a window, as a medium."""

    blocks = BLOCKS

    def __init__(self, link: SimulatedLink, end: str) -> None:
        self._link, self._end = link, end

    def read(self, block: int, count: int = 1) -> bytearray:
        self._link.deliver()
        copies = self._link.copies[self._end]
        return bytearray().join(copies.get(number, bytes(BLOCK_BYTES)) for number in range(block, block + count))

    def write(self, block: int, data: Bytes) -> None:
        for at in range(0, len(data), BLOCK_BYTES):
            part = bytes(data[at : at + BLOCK_BYTES])
            self._link.write(self._end, block + at // BLOCK_BYTES, part + bytes(BLOCK_BYTES - len(part)))
