"""Queues over what is open: by io_uring, or by threads where the kernel has none."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from csd_io.queue import Ended, Request, address, check
from csd_io.ring import Ring


class Target(Protocol):
    """An open file or device; names and sizes are those of a `Queue`."""

    name: str
    size_bytes: int
    block_bytes: int
    max_bytes: int
    wide: bool  # whether its entries in a ring are commands of its driver

    def prepare(self, ring: Ring, number: int, request: Request, fixed: int | None) -> None:
        """Give a ring a request; fixed: the number of its buffer among those registered."""
        ...

    def move(self, request: Request) -> int:
        """Carry out a request now; returns what a ring's completion would say."""
        ...

    def outcome(self, request: Request, result: int) -> Ended:
        """What the result of a request means."""
        ...

    def discard(self, offset: int, size: int) -> None:
        """As that of a queue."""
        ...

    def sync(self) -> None:
        """As that of a queue."""
        ...

    def close(self) -> None:
        """Let go."""
        ...


class BlockQueue:
    """A `Queue` of a target's blocks."""

    def __init__(self, target: Target, depth: int) -> None:
        self.name, self.size_bytes = target.name, target.size_bytes
        self.block_bytes, self.max_bytes, self.depth = target.block_bytes, target.max_bytes, depth
        self._target, self._engine = target, _engine(target, depth)
        self._flying: dict[int, Request] = {}  # by number; keeps their buffers
        self._number = 0

    @property
    def how(self) -> str:
        return self._engine.how

    def register(self, buffers: Sequence[memoryview]) -> None:
        self._engine.register(buffers)

    def submit(self, requests: Sequence[Request]) -> None:
        check(self, requests, len(self._flying))
        numbered = list(enumerate(requests, self._number))
        self._number += len(numbered)
        self._flying.update(numbered)
        self._engine.begin(numbered)

    def reap(self, at_least: int) -> list[Ended]:
        ended = self._engine.reap(min(at_least, len(self._flying)))
        return [self._target.outcome(self._flying.pop(number), result) for number, result in ended]

    def discard(self, offset: int, size: int) -> None:
        if (offset | size) % self.block_bytes or size < 1 or not 0 <= offset <= self.size_bytes - size:
            raise ValueError(f"{self.name}: discard of {size} bytes at {offset}")
        self._target.discard(offset, size)

    def sync(self) -> None:
        self._target.sync()

    def close(self) -> None:
        self.reap(len(self._flying))
        self._engine.close()
        self._target.close()


class _RingEngine:
    def __init__(self, target: Target, depth: int) -> None:
        self.how = "io_uring"
        self._target, self._ring = target, Ring(depth, target.wide)
        self._fixed: dict[int, tuple[int, int]] = {}  # by address: number of a registered buffer, its bytes
        self._found: list[tuple[int, int]] = []  # what an interrupt of a wait must not lose

    def register(self, buffers: Sequence[memoryview]) -> None:
        try:
            self._ring.register(buffers)
        except OSError:  # more than this user may pin: they are used as any other
            return
        self.how = "io_uring, registered buffers"
        self._fixed = {address(buffer): (number, buffer.nbytes) for number, buffer in enumerate(buffers)}

    def begin(self, requests: Sequence[tuple[int, Request]]) -> None:
        for number, request in requests:
            fixed, size = self._fixed.get(address(request.buffer), (0, 0))
            self._target.prepare(self._ring, number, request, fixed if request.buffer.nbytes <= size else None)
        self._ring.enter(0)

    def reap(self, at_least: int) -> list[tuple[int, int]]:
        self._found += self._ring.completions()
        while len(self._found) < at_least:
            self._ring.enter(at_least - len(self._found))
            self._found += self._ring.completions()
        found, self._found = self._found, []
        return found

    def close(self) -> None:
        self._ring.close()


class _Threads:
    def __init__(self, target: Target, depth: int, why: str) -> None:
        self.how = f"threads ({why})"
        self._target, self._pool = target, ThreadPoolExecutor(depth, "io")
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def register(self, buffers: Sequence[memoryview]) -> None:
        """Nothing is gained."""

    def begin(self, requests: Sequence[tuple[int, Request]]) -> None:
        for number, request in requests:
            self._pool.submit(self._carry_out, number, request)

    def _carry_out(self, number: int, request: Request) -> None:
        try:
            result = self._target.move(request)
        except OSError as error:
            result = -(error.errno or 0)
        self._ended.put((number, result))

    def reap(self, at_least: int) -> list[tuple[int, int]]:
        found = [self._ended.get() for _ in range(at_least)]
        return found + [self._ended.get() for _ in range(self._ended.qsize())]

    def close(self) -> None:
        self._pool.shutdown()


def _engine(target: Target, depth: int) -> _RingEngine | _Threads:
    try:
        return _RingEngine(target, depth)
    except OSError as error:  # a kernel without io_uring, or one that allows none
        return _Threads(target, depth, str(error.strerror))
