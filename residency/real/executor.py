"""A turn with bytes: threads that copy between frames, and a ticket for each copy."""

from __future__ import annotations

import heapq
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from csd_io.queue import aligned
from residency.machine import Path
from residency.real.frames import CachedFiles, Frame, Store, move
from residency.table import Extent, Ticket, Transfer
from residency.turn import Attention

THREADS = 2  # of a path: one for K and one for V
BOUNCE_BYTES = 8 << 20
EMA_SHARE = 0.1
FIRST_GUESS_BPS = 1e9  # of a path, until it has moved something


@dataclass(slots=True, eq=False)
class RealCopy:
    """A copy under way. error: why it failed; whoever waits for it fails too."""

    transfer: Transfer
    path: Path
    source: Frame
    target: Frame
    number: int
    urgency: float = 0.0
    waits: int = 0
    began_ns: int = 0
    ended_ns: int = 0
    done: bool = False
    error: Exception | None = None
    when_done: list[Callable[[], None]] = field(default_factory=list)

    def __lt__(self, other: RealCopy) -> bool:
        return (-self.urgency, self.number) < (-other.urgency, other.number)


class Real:
    """An executor of bytes. Used by one thread at a time, beside those that copy.

    stores: of each place. capacity: bytes that an extent may come to have. attends: called for attention, returns when
    it has been done. moved: bytes by path; stalls_s: by path, how long the model waited for it.
    """

    def __init__(
        self,
        stores: Mapping[str, Store],
        capacity: Callable[[Extent], int],
        attends: Callable[[Attention], None],
        buffer: Callable[[int], memoryview] = aligned,
    ) -> None:
        """buffer: makes what copies go through where neither side is this process's memory."""
        self.stores, self._capacity, self._attends, self._buffer = stores, capacity, attends, buffer
        self.frames: dict[tuple[Extent, str], Frame] = {}
        self.moved: Counter[str] = Counter()
        self.stalls_s: defaultdict[str, float] = defaultdict(float)
        self._pending: Counter[str] = Counter()
        self._rate: dict[str, float] = {}
        self._last: dict[str, RealCopy] = {}
        self._changed = threading.Condition()
        self._queues: dict[str, list[RealCopy]] = {}
        self._threads: list[threading.Thread] = []
        self._count, self._layer_s, self._closed = 0, 0.0, False

    def frame(self, extent: Extent, place: str) -> Frame:
        """Where an extent lies, or is going to."""
        key = extent, place
        if key not in self.frames:
            self.frames[key] = self.stores[place].frame(extent, self._capacity(extent))
        return self.frames[key]

    def begin(self, transfer: Transfer, path: Path, in_turn: bool, urgency: float) -> RealCopy:
        source, target = self.frame(transfer.extent, transfer.source), self.frame(transfer.extent, transfer.target)
        self._count += 1
        copy = RealCopy(transfer, path, source, target, self._count, urgency)
        needed = [ticket for ticket in transfer.after if isinstance(ticket, RealCopy)]
        last = self._last.get(path.name) if in_turn else None
        self._last[path.name] = copy
        with self._changed:
            self._pending[path.name] += transfer.tokens * transfer.row_bytes
            self._follow(copy, needed, last)
        return copy

    def release(self, extent: Extent, place: str, after: tuple[Ticket, ...]) -> None:
        """An extent has left a place; its frame goes when those that still use it have ended."""
        frame = self.frames.pop((extent, place), None)
        if frame is None:
            return
        with self._changed:
            left = [ticket for ticket in after if isinstance(ticket, RealCopy) and not ticket.done]
            count = len(left)

            def ended() -> None:
                nonlocal count
                count -= 1
                if count <= 0:
                    frame.free()

            for ticket in left:
                ticket.when_done.append(ended)
        if not left:
            frame.free()

    def attend(self, attention: Attention) -> None:
        self.wait(attention.waits)
        self._attends(attention)

    def wait(self, tickets: Iterable[Ticket]) -> None:
        """Raises what a copy has failed by, an OSError for a disk."""
        for ticket in tickets:
            assert isinstance(ticket, RealCopy)
            began = time.perf_counter()
            with self._changed:
                self._changed.wait_for(lambda ticket=ticket: ticket.done)  # type: ignore[misc]  # bound at once
            self.stalls_s[ticket.path.name] += time.perf_counter() - began
            if ticket.error:
                raise ticket.error

    def end(self) -> None:
        pass

    def settle(self) -> None:
        """Let all copies end, whatever their outcome."""
        with self._changed:
            self._changed.wait_for(lambda: not any(self._pending.values()))

    def close(self) -> None:
        """Let all copies end, and free everything."""
        self.settle()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for frame in self.frames.values():
            frame.free()
        self.frames.clear()
        for store in self.stores.values():
            store.close()

    def forget(self, request: Hashable) -> None:
        """A request is over: all of it has been released, and its copies have ended."""
        for store in self.stores.values():
            store.forget(request)

    def queued_s(self, path: Path) -> float:
        return self._pending[path.name] / self._rate.get(path.name, FIRST_GUESS_BPS)

    def transfer_s(self, path: Path, nbytes: int) -> float:
        return nbytes / self._rate.get(path.name, FIRST_GUESS_BPS)

    def layer_s(self) -> float:
        return self._layer_s

    def found(self, place: str) -> tuple[int, int] | None:
        store = self.stores[place]
        if not isinstance(store, CachedFiles) or store.hit_bytes is None:
            return None
        return store.read_bytes, store.hit_bytes

    def computed(self, seconds: float) -> None:
        """A layer took so long, waiting left out."""
        self._layer_s += (EMA_SHARE if self._layer_s else 1.0) * (seconds - self._layer_s)

    def _follow(self, copy: RealCopy, needed: list[RealCopy], last: RealCopy | None) -> None:
        """Queue a copy when those before it have ended; without one that it needs it fails too."""
        running = [each for each in [*needed, *([last] if last else [])] if not each.done]
        copy.error = next((each.error for each in needed if each.error), None)
        copy.waits = len(running)

        def ended(each: RealCopy) -> None:
            copy.waits -= 1
            copy.error = copy.error or (each.error if each is not last else None)
            if not copy.waits:
                self._queue(copy)

        for each in running:
            each.when_done.append(lambda each=each: ended(each))  # type: ignore[misc]  # bound at once
        if not running:
            self._queue(copy)

    def _queue(self, copy: RealCopy) -> None:
        name = copy.path.name
        if name not in self._queues:
            self._queues[name] = []
            for number in range(THREADS):
                thread = threading.Thread(target=self._copies, args=(name,), name=f"{name}-{number}", daemon=True)
                self._threads.append(thread)
                thread.start()
        heapq.heappush(self._queues[name], copy)
        self._changed.notify_all()

    def _copies(self, name: str) -> None:
        """What a thread of a path does: the most urgent copy, then the next."""
        queue, buffer = self._queues[name], None

        def bounce() -> memoryview:
            nonlocal buffer
            buffer = buffer or self._buffer(BOUNCE_BYTES)
            return buffer

        while True:
            with self._changed:
                self._changed.wait_for(lambda: queue or self._closed)
                if not queue:
                    return
                copy = heapq.heappop(queue)
            self._carry_out(copy, bounce)

    def _carry_out(self, copy: RealCopy, bounce: Callable[[], memoryview]) -> None:
        transfer, path = copy.transfer, copy.path
        copy.began_ns = time.monotonic_ns()
        row = transfer.row_bytes
        first, end = path.blocks(transfer.first * row, (transfer.first + transfer.tokens) * row)
        if copy.error is None:
            try:
                move(copy.source, copy.target, first, end, bounce)
            except Exception as error:  # whatever it is: it is raised by whoever needs this copy
                copy.error = error
        with self._changed:
            copy.ended_ns = time.monotonic_ns()
            self._pending[path.name] -= transfer.tokens * row
            if copy.error is None and end > first:
                self.moved[path.name] += end - first
                rate = (end - first) * 1e9 / max(1, copy.ended_ns - copy.began_ns)
                self._rate[path.name] = self._rate.get(path.name, rate) * (1 - EMA_SHARE) + EMA_SHARE * rate
            copy.done = True
            for act in copy.when_done:
                act()
            self._changed.notify_all()
