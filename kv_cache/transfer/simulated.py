"""Transfers in simulated time: copies over links, attention on the device and in drives."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from kv_cache.block_table import BlockKey, CopyRange, Transfer
from kv_cache.events import Events
from kv_cache.hardware import Machine, Route, Tier
from kv_cache.network import LinkNetwork
from kv_cache.page_cache import PageCache
from kv_cache.transfer.engine import AttendCall

EMA_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Time of a layer for some requests: on the device, then in drives if these attend, ns."""

    device_ns: float
    drives_ns: float = 0


Compute = Callable[[AttendCall], LayerTime]


@dataclass(slots=True, eq=False)
class SimulatedTransfer:
    """A copy in flight."""

    copy_range: CopyRange
    route: Route
    urgency: float
    waits: int = 0
    began_ns: float = 0
    ended_ns: float = 0
    done: bool = False
    failed: bool = False  # simulated copies never fail
    entered: bool = False  # all pieces have passed the first link
    pieces_left: int = 0
    when_entered: list[Callable[[], None]] = field(default_factory=list)
    when_done: list[Callable[[], None]] = field(default_factory=list)


@dataclass(slots=True)
class _WriteBack:
    """Dirty bytes of a tier, and copies that wait for write-back."""

    limit_bytes: int | None
    dirty: int = 0
    waiting: list[Callable[[], None]] = field(default_factory=list)

    @property
    def full(self) -> bool:
        return self.limit_bytes is not None and self.dirty > self.limit_bytes


Tracer = Callable[[str, int, float, float, int], None]
"""Receives an activity (`compute`, `drives`, `wait ROUTE` or the route of a copy), layer, begin, end, ns, and bytes."""


class SimulatedTransfers:
    """Transfers in simulated time, without bytes.

    Attributes:
        compute: Returns the time of a layer.
        iterations_ns: Duration of each iteration, ns.
        moved: Bytes by route.
        stalls_ns: Time that the model waited for each route, ns.
        tracer: Called for each layer's compute, wait and copy, for a timeline; None: not called.
    """

    def __init__(self, machine: Machine, compute: Compute) -> None:
        self.machine, self.compute = machine, compute
        self.events = Events()
        self.network = LinkNetwork(self.events, machine.links)
        tiers = machine.tiers.values()
        self.caches = {tier.name: PageCache(tier.cache_bytes) for tier in tiers if tier.cache_bytes is not None}
        self._write_back = {tier.name: _WriteBack(tier.dirty_bytes) for tier in tiers}
        self._last: dict[str, SimulatedTransfer] = {}  # last FIFO copy of each route
        self._ready_ns: dict[Hashable, float] = {}  # time of the drives' completion, by request
        self._drives_free_ns = self._began_ns = 0.0
        self._layer_s = 0.0
        self.moved: Counter[str] = Counter()
        self.stalls_ns: defaultdict[str, float] = defaultdict(float)
        self.iterations_ns: list[float] = []
        self.tracer: Tracer | None = None

    @property
    def now_ns(self) -> float:
        """Simulated time of the model's own work."""
        return self.events.now_ns

    @property
    def selects(self) -> bool:
        return True

    def begin(self, copy_range: CopyRange, route: Route, fifo: bool, urgency: float) -> SimulatedTransfer:
        copy = SimulatedTransfer(copy_range, route, urgency)
        before = [
            transfer for transfer in copy_range.after if isinstance(transfer, SimulatedTransfer) and not transfer.done
        ]
        last = self._last.get(route.name) if fifo else None
        enters_after = last is not None and not last.entered
        copy.waits = len(before) + enters_after

        def go() -> None:
            copy.waits -= 1
            assert copy.waits >= 0, f"{copy.copy_range.block}: a transfer that it waits for ends twice"
            if copy.waits <= 0:
                self._start(copy)

        for transfer in before:
            transfer.when_done.append(go)
        if last is not None and enters_after:
            last.when_entered.append(go)
        if fifo:
            self._last[route.name] = copy
        if not copy.waits:
            self._start(copy)
        return copy

    def release(self, block: BlockKey, tier: str, after: tuple[Transfer, ...]) -> None:
        if cache := self.caches.get(tier):
            cache.forget(block)

    def attend(self, attention: AttendCall) -> None:
        self.wait((*attention.waits, *attention.until_free))
        ready_ns = max(self._ready_ns.get(row, 0) for row in attention.rows)
        if ready_ns > self.now_ns:
            self.events.run_to(ready_ns)
        work, began_ns = self.compute(attention), self.now_ns
        self.events.run_to(self.now_ns + work.device_ns)
        self._trace("compute", attention.layer, began_ns, self.now_ns)
        if work.drives_ns:
            began_ns = max(self._drives_free_ns, self.now_ns)
            self._drives_free_ns = began_ns + work.drives_ns
            self._trace("drives", attention.layer, began_ns, self._drives_free_ns)
            self._ready_ns |= dict.fromkeys(attention.rows, self._drives_free_ns)
        took_s = (work.device_ns + work.drives_ns) / 1e9
        self._layer_s += (EMA_SHARE if self._layer_s else 1.0) * (took_s - self._layer_s)

    def wait(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            if not transfer.done:
                since_ns = self.now_ns
                self.events.run_until(lambda transfer=transfer: transfer.done)  # type: ignore[misc]  # bound at once
                assert isinstance(transfer, SimulatedTransfer)
                self.stalls_ns[transfer.route.name] += self.now_ns - since_ns
                self._trace(f"wait {transfer.route.name}", transfer.copy_range.block.layer, since_ns, self.now_ns)

    def end(self) -> None:
        self.events.run_to(max(self._ready_ns.values(), default=0))
        assert self.now_ns >= self._began_ns
        self.iterations_ns.append(self.now_ns - self._began_ns)
        self._began_ns = self.now_ns

    def settle(self) -> None:
        """Wait for all copies and write-back."""
        while (next_ns := self.events.next_ns) is not None:
            self.events.run_to(next_ns)

    def set_tiers(self, tiers: Mapping[str, Tier]) -> None:
        for name, cache in self.caches.items():
            cache.set_limit(tiers[name].cache_bytes)

    def queued_s(self, route: Route) -> float:
        links = self.machine.links
        return max(self.network.queued_bytes(name) / links[name].bytes_per_s for name in route.links)

    def transfer_s(self, route: Route, nbytes: int) -> float:
        links = [self.machine.links[name] for name in route.links]
        piece = min(nbytes, route.piece_bytes or nbytes)  # pieces are pipelined through the links
        alone_s = [piece / link.bytes_per_s + (link.start_ns + link.overhead_ns) / 1e9 for link in links]
        return sum(alone_s) + max((nbytes - piece) / link.bytes_per_s for link in links)

    def layer_s(self) -> float:
        return self._layer_s

    def page_cache_hits(self, tier: str) -> tuple[int, int] | None:
        cache = self.caches.get(tier)
        return (cache.read_bytes, cache.hit_bytes) if cache else None

    def _trace(self, activity: str, layer: int, began_ns: float, ended_ns: float, nbytes: int = 0) -> None:
        if self.tracer and ended_ns > began_ns:
            self.tracer(activity, layer, began_ns, ended_ns, nbytes)

    def _start(self, copy: SimulatedTransfer) -> None:
        """Start a copy: cut it into pieces that enter the first link one after the other."""
        copy_range, route = copy.copy_range, copy.route
        assert not (copy.waits or copy.pieces_left or copy.done), f"{copy_range.block}: its transfer starts twice"
        copy.began_ns = self.now_ns
        row = copy_range.row_bytes
        first, end = route.blocks(copy_range.first * row, (copy_range.first + copy_range.tokens) * row)
        self.moved[route.name] += end - first
        size = route.piece_bytes or max(end, 1)
        numbers = range(first // size, -(-end // size)) if end > first else range(0)
        pieces = [(number, max(first, number * size), min(end, (number + 1) * size)) for number in numbers]
        copy.pieces_left = len(pieces)
        if pieces:
            self._enter(copy, pieces, 0)
        else:
            self._entered(copy)
            self._ended(copy)

    def _enter(self, copy: SimulatedTransfer, pieces: list[tuple[int, int, int]], number: int) -> None:
        """Send a piece over its links; the next one enters when this one has left the first link."""
        index, first, end = pieces[number]
        links, block = copy.route.links, copy.copy_range.block
        if cache := self.caches.get(copy.copy_range.source):
            offset = index * copy.route.piece_bytes
            if not cache.read((block, index), end - offset, end - first) and copy.route.miss_links:
                links = copy.route.miss_links

        def passed(stage: int) -> None:
            if stage == 1:
                if number + 1 < len(pieces):
                    self._enter(copy, pieces, number + 1)
                else:
                    self._entered(copy)
            if stage < len(links):
                self.network.send(links[stage], end - first, lambda: passed(stage + 1), copy.urgency)
            else:
                self._arrived(copy, index, end - index * copy.route.piece_bytes, end - first)

        passed(0)

    def _arrived(self, copy: SimulatedTransfer, index: int, held: int, nbytes: int) -> None:
        """Complete a piece that has passed its links; a target with too many dirty bytes delays it until write-back."""
        target = copy.copy_range.target
        if cache := self.caches.get(target):
            cache.put((copy.copy_range.block, index), held)

        def over() -> None:
            copy.pieces_left -= 1
            assert copy.pieces_left >= 0
            if not copy.pieces_left:
                self._ended(copy)

        if not copy.route.background:
            over()
            return
        back = self._write_back[target]
        back.dirty += nbytes
        self._clean(back, copy.route.background, nbytes)
        if back.full:
            back.waiting.append(over)
        else:
            over()

    def _clean(self, back: _WriteBack, links: tuple[str, ...], nbytes: int) -> None:
        def passed(stage: int) -> None:
            if stage < len(links):
                self.network.send(links[stage], nbytes, lambda: passed(stage + 1))
                return
            back.dirty -= nbytes
            assert back.dirty >= 0, f"{back.dirty} dirty bytes"
            while back.waiting and not back.full:
                back.waiting.pop(0)()

        passed(0)

    def _entered(self, copy: SimulatedTransfer) -> None:
        assert not copy.entered
        copy.entered = True
        for act in copy.when_entered:
            act()

    def _ended(self, copy: SimulatedTransfer) -> None:
        assert copy.entered and not copy.done and not copy.pieces_left
        copy.done, copy.ended_ns = True, self.now_ns
        what = copy.copy_range
        self._trace(copy.route.name, what.block.layer, copy.began_ns, copy.ended_ns, what.tokens * what.row_bytes)
        for act in copy.when_done:
            act()
