"""Transfers with real bytes: threads that copy between frames, and a handle for each copy."""

from __future__ import annotations

import errno
import heapq
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from csd_io.queue import aligned
from kv_cache.block_table import BlockKey, CopyRange, PolicyError, Transfer
from kv_cache.hardware import CSD, Route, Tier
from kv_cache.transfer.engine import AttendCall
from kv_cache.transfer.frames import CachedFiles, Frame, Store, move

THREADS = 2  # per route: keys and values
BOUNCE_BYTES = 8 << 20
EMA_SHARE = 0.1
FIRST_GUESS_BPS = 1e9  # assumed rate of a route before its first transfer


@dataclass(slots=True, eq=False)
class RealTransfer:
    """A copy of bytes [first, end) of a frame. If it fails (`error`), transfers that need it fail too."""

    route: Route
    tiers: tuple[str, str]
    source: Frame
    target: Frame
    first: int
    end: int
    number: int
    urgency: float = 0.0
    waits: int = 0
    began_ns: int = 0
    ended_ns: int = 0
    done: bool = False
    error: Exception | None = None
    when_done: list[Callable[[], None]] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether the copy has failed."""
        return self.error is not None

    def __lt__(self, other: RealTransfer) -> bool:
        return (-self.urgency, self.number) < (-other.urgency, other.number)


class RealTransfers:
    """Executor with real bytes. Used by one thread at a time, in addition to its copy threads.

    Attributes:
        stores: Storage of each tier.
        moved: Bytes by route.
        stalls_s: Time that the model waited for each route, seconds.
    """

    def __init__(
        self,
        stores: Mapping[str, Store],
        capacity: Callable[[BlockKey], int],
        attends: Callable[[AttendCall], None],
        buffer: Callable[[int], memoryview] = aligned,
    ) -> None:
        """Create an executor.

        Args:
            stores: Storage of each tier.
            capacity: Maximum size of a block, bytes.
            attends: Called for attention; returns when it is complete.
            buffer: Allocates a bounce buffer of the given size, for copies between two files or devices.
        """
        self.stores, self._capacity, self._attends, self._buffer = stores, capacity, attends, buffer
        self.frames: dict[tuple[BlockKey, str], Frame] = {}
        self.moved: Counter[str] = Counter()
        self.stalls_s: defaultdict[str, float] = defaultdict(float)
        self._pending: Counter[str] = Counter()
        self._rate: dict[str, float] = {}
        self._last: dict[str, RealTransfer] = {}
        self._changed = threading.Condition()
        self._queues: dict[str, list[RealTransfer]] = {}
        self._threads: list[threading.Thread] = []
        self._under_way: Counter[str] = Counter()  # copies by tier
        self._count = 0
        self._layer_s, self._closed = 0.0, False

    def frame(self, block: BlockKey, tier: str) -> Frame:
        """Frame of a block in a tier; allocated at the first use."""
        key = block, tier
        if key not in self.frames:
            self.frames[key] = self.stores[tier].frame(block, self._capacity(block))
        return self.frames[key]

    @property
    def selects(self) -> bool:
        return False

    def begin(self, copy_range: CopyRange, route: Route, fifo: bool, urgency: float) -> RealTransfer:
        # Drives get the layers of a prompt in their order, so that their simulated time does not depend on threads
        tiers = copy_range.source, copy_range.target
        self._start_workers(route.name, 1 if CSD in tiers else THREADS)
        source, target = (self.frame(copy_range.block, tier) for tier in tiers)
        row = copy_range.row_bytes
        first, end = route.blocks(copy_range.first * row, (copy_range.first + copy_range.tokens) * row)
        self._count += 1
        copy = RealTransfer(route, tiers, source, target, first, end, self._count, urgency)
        before = {id(transfer): transfer for transfer in (*copy_range.after, *copy_range.needs)}
        if fifo and (last := self._last.get(route.name)):
            before[id(last)] = last
        self._last[route.name] = copy
        with self._changed:
            self._under_way.update(tiers)
            self._pending[route.name] += end - first
            self._follow(
                copy, [transfer for transfer in before.values() if isinstance(transfer, RealTransfer)], copy_range.needs
            )
        return copy

    def release(self, block: BlockKey, tier: str, after: tuple[Transfer, ...]) -> None:
        """Free the frame of a dropped copy when the transfers that still use it have finished."""
        frame = self.frames.pop((block, tier), None)
        if frame is None:
            return
        with self._changed:
            left = [transfer for transfer in after if isinstance(transfer, RealTransfer) and not transfer.done]
            count = len(left)

            def ended() -> None:
                nonlocal count
                count -= 1
                assert count >= 0, f"{block}: a transfer ends twice"
                if count <= 0:
                    frame.free()

            for transfer in left:
                transfer.when_done.append(ended)
        if not left:
            frame.free()

    def attend(self, attention: AttendCall) -> None:
        for transfer in attention.until_free:
            self._await(transfer)
        self.wait(attention.waits)
        began = time.perf_counter()
        self._attends(attention)
        took_s = time.perf_counter() - began
        self._layer_s += (EMA_SHARE if self._layer_s else 1.0) * (took_s - self._layer_s)

    def wait(self, transfers: Iterable[Transfer]) -> None:
        """Wait for copies; raises the error of a failed one (OSError for a disk)."""
        for transfer in transfers:
            if error := self._await(transfer).error:
                raise error

    def _await(self, transfer: Transfer) -> RealTransfer:
        """Wait until a copy has finished, on success or failure."""
        if not isinstance(transfer, RealTransfer):
            raise PolicyError(f"{transfer!r} is not a transfer: pass what `copy` or `move` returned")
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: transfer.done)
        self.stalls_s[transfer.route.name] += time.perf_counter() - began
        return transfer

    def end(self) -> None:
        pass

    def settle(self, tier: str | None = None) -> None:
        """Wait until all copies, or those to and from a tier, have finished, on success or failure."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._under_way[tier] if tier else any(self._under_way.values())))

    def close(self) -> None:
        """Wait for all copies and free everything."""
        try:
            self.settle()
        finally:  # also after an interruption of the wait
            with self._changed:
                self._closed = True
                self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        assert not any(self._queues.values()), "a transfer was queued after the end"
        for frame in self.frames.values():
            frame.free()
        self.frames.clear()
        for store in self.stores.values():
            store.close()

    def crop(self, block: BlockKey, nbytes: int) -> None:
        """Release all but the first bytes of a block without transfers in flight."""
        for tier in self.stores:
            if frame := self.frames.get((block, tier)):
                frame.trim(nbytes)

    def forget(self, request: Hashable) -> None:
        """Release a finished request, whose blocks are freed and whose copies have finished."""
        for store in self.stores.values():
            store.forget(request)

    def set_tiers(self, tiers: Mapping[str, Tier]) -> None:
        """Nothing to do: frames are allocated one by one, and the kernel limits its page cache itself."""

    def queued_s(self, route: Route) -> float:
        return self._pending[route.name] / self._rate.get(route.name, FIRST_GUESS_BPS)

    def transfer_s(self, route: Route, nbytes: int) -> float:
        return nbytes / self._rate.get(route.name, FIRST_GUESS_BPS)

    def layer_s(self) -> float:
        return self._layer_s

    def page_cache_hits(self, tier: str) -> tuple[int, int] | None:
        store = self.stores[tier]
        if not isinstance(store, CachedFiles) or store.hit_bytes is None:
            return None
        return store.read_bytes, store.hit_bytes

    def _follow(self, copy: RealTransfer, before: list[RealTransfer], needs: tuple[Transfer, ...]) -> None:
        """Queue a copy after the ones it waits for; it fails if one that it needs has failed."""
        running = [earlier for earlier in before if not earlier.done]
        copy.waits = len(running)

        def go() -> None:
            copy.error = next((earlier.error for earlier in before if earlier in needs and earlier.error), None)
            before.clear()  # otherwise each copy would keep all earlier ones alive
            heapq.heappush(self._queues[copy.route.name], copy)
            self._changed.notify_all()

        def ended() -> None:
            copy.waits -= 1
            assert copy.waits >= 0, f"{copy.route.name}: a transfer ends twice"
            if not copy.waits:
                go()

        for earlier in running:
            earlier.when_done.append(ended)
        if not running:
            go()

    def _start_workers(self, name: str, threads: int) -> None:
        """Start the threads of a route; raises OSError if no thread can be created."""
        if name in self._queues:
            return
        self._queues[name] = []
        try:
            for number in range(threads):
                thread = threading.Thread(target=self._copies, args=(name,), name=f"{name}-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError as error:
            if not number:
                del self._queues[name]
                raise OSError(errno.EAGAIN, f"cannot start a copy thread: {error}", name) from error

    def _copies(self, name: str) -> None:
        """Main loop of a copy thread: run the copy of highest priority."""
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

    def _carry_out(self, copy: RealTransfer, bounce: Callable[[], memoryview]) -> None:
        name, nbytes = copy.route.name, copy.end - copy.first
        copy.began_ns = time.monotonic_ns()
        if copy.error is None:
            try:
                assert not (copy.done or copy.waits) and 0 <= nbytes <= self._pending[name]
                move(copy.source, copy.target, copy.first, copy.end, bounce)
            except Exception as error:  # noqa: BLE001 - raised by the waiters of this copy
                copy.error = error
        with self._changed:
            copy.ended_ns = time.monotonic_ns()
            self._pending[name] -= nbytes
            self._under_way.subtract(copy.tiers)
            if copy.error is None and nbytes:
                self.moved[name] += nbytes
                rate = nbytes * 1e9 / max(1, copy.ended_ns - copy.began_ns)
                self._rate[name] = self._rate.get(name, rate) * (1 - EMA_SHARE) + EMA_SHARE * rate
            copy.done = True
            for act in copy.when_done:
                act()
            copy.when_done.clear()
            self._changed.notify_all()
