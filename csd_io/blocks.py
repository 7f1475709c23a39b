"""Block queues over an open target, through io_uring or, if the kernel does not offer it, threads."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from csd_io.queue import IoCompletion, IoRequest, address, check
from csd_io.ring import Ring


class IoTarget(Protocol):
    """An open file or device; names and sizes are those of a `Queue`."""

    name: str
    size_bytes: int
    block_bytes: int
    max_bytes: int
    uses_sqe128: bool  # whether its ring entries are driver commands (128-byte SQEs)

    def prepare(self, ring: Ring, number: int, request: IoRequest, fixed: int | None) -> None:
        """Add a request to a ring; `fixed` is the index of its buffer if it is registered."""
        ...

    def move(self, request: IoRequest) -> int:
        """Execute a request synchronously; returns the result that a ring's completion would have."""
        ...

    def outcome(self, request: IoRequest, result: int) -> IoCompletion:
        """Convert the result of a request to a completion."""
        ...

    def discard(self, offset: int, size: int) -> None:
        """See `Queue.discard`."""
        ...

    def sync(self) -> None:
        """See `Queue.sync`."""
        ...

    def close(self) -> None:
        """Close the target."""
        ...


class BlockQueue:
    """A `Queue` over the blocks of a target."""

    def __init__(self, target: IoTarget, depth: int) -> None:
        self.name, self.size_bytes = target.name, target.size_bytes
        self.block_bytes, self.max_bytes, self.depth = target.block_bytes, target.max_bytes, depth
        self._target, self._engine = target, _engine(target, depth)
        self._in_flight: dict[int, IoRequest] = {}  # by number; keeps their buffers alive
        self._number = 0

    @property
    def how(self) -> str:
        return self._engine.how

    def register(self, buffers: Sequence[memoryview]) -> None:
        self._engine.register(buffers)

    def submit(self, requests: Sequence[IoRequest]) -> None:
        check(self, requests, len(self._in_flight))
        numbered = list(enumerate(requests, self._number))
        assert self._number not in self._in_flight, f"{self.name}: a request has the number of another one"
        self._number += len(numbered)
        self._in_flight.update(numbered)
        self._engine.begin(numbered)

    def reap(self, at_least: int) -> list[IoCompletion]:
        ended = self._engine.reap(min(at_least, len(self._in_flight)))
        return [self._target.outcome(self._in_flight.pop(number), result) for number, result in ended]

    def discard(self, offset: int, size: int) -> None:
        if (offset | size) % self.block_bytes or size < 1 or not 0 <= offset <= self.size_bytes - size:
            raise ValueError(f"{self.name}: discard of {size} bytes at {offset}")
        self._target.discard(offset, size)

    def sync(self) -> None:
        self._target.sync()

    def close(self) -> None:
        self.reap(len(self._in_flight))
        assert not self._in_flight, f"{self.name}: closed with requests in flight"
        self._engine.close()
        self._target.close()


class _RingEngine:
    def __init__(self, target: IoTarget, depth: int) -> None:
        self.how = "io_uring"
        self._target, self._ring = target, Ring(depth, target.uses_sqe128)
        self._fixed: dict[int, tuple[int, int]] = {}  # by address: number of a registered buffer, its bytes
        self._found: list[tuple[int, int]] = []  # completions kept if a wait is interrupted

    def register(self, buffers: Sequence[memoryview]) -> None:
        try:
            self._ring.register(buffers)
        except OSError:  # RLIMIT_MEMLOCK: use them unregistered
            return
        self.how = "io_uring, registered buffers"
        self._fixed = {address(buffer): (number, buffer.nbytes) for number, buffer in enumerate(buffers)}

    def begin(self, requests: Sequence[tuple[int, IoRequest]]) -> None:
        for number, request in requests:
            fixed, size = self._fixed.get(address(request.buffer), (0, 0))
            self._target.prepare(self._ring, number, request, fixed if request.buffer.nbytes <= size else None)
        self._ring.enter(0)

    def reap(self, at_least: int) -> list[tuple[int, int]]:
        self._found += self._ring.completions()
        while len(self._found) < at_least:
            self._ring.enter(at_least - len(self._found))
            self._found += self._ring.completions()
        ended, self._found = self._found, []
        return ended

    def close(self) -> None:
        self._ring.close()


class _Threads:
    def __init__(self, target: IoTarget, depth: int, why: str) -> None:
        self.how = f"threads ({why})"
        self._target, self._pool = target, ThreadPoolExecutor(depth, "io")
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def register(self, buffers: Sequence[memoryview]) -> None:
        """No-op: threads gain nothing from registered buffers."""

    def begin(self, requests: Sequence[tuple[int, IoRequest]]) -> None:
        for number, request in requests:
            self._pool.submit(self._carry_out, number, request)

    def _carry_out(self, number: int, request: IoRequest) -> None:
        try:
            result = self._target.move(request)
        except OSError as error:
            result = -(error.errno or 0)
        self._ended.put((number, result))

    def reap(self, at_least: int) -> list[tuple[int, int]]:
        ended = [self._ended.get() for _ in range(at_least)]
        return ended + [self._ended.get() for _ in range(self._ended.qsize())]

    def close(self) -> None:
        self._pool.shutdown()


def _engine(target: IoTarget, depth: int) -> _RingEngine | _Threads:
    try:
        return _RingEngine(target, depth)
    except OSError as error:  # io_uring is missing or forbidden
        return _Threads(target, depth, str(error.strerror))
