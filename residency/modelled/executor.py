"""A turn in modelled time: copies over links, attention on the device and in drives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from residency.executor import Attention
from residency.machine import Machine, Path
from residency.modelled.cache import PageCache
from residency.modelled.events import Events
from residency.modelled.links import Network
from residency.table import Extent, Ticket, Transfer

EMA_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Work:
    """What a layer of some requests takes: on the device, and then in drives, where those attend."""

    device_ns: int
    drives_ns: int = 0


Compute = Callable[[Attention], Work]


@dataclass(slots=True, eq=False)
class ModelledCopy:
    """A copy under way."""

    transfer: Transfer
    path: Path
    urgency: float
    waits: int = 0
    began_ns: int = 0
    ended_ns: int = 0
    done: bool = False
    failed: bool = False  # never: no bytes, no disk
    entered: bool = False  # the first link is behind all of it
    pieces_left: int = 0
    when_entered: list[Callable[[], None]] = field(default_factory=list)
    when_done: list[Callable[[], None]] = field(default_factory=list)


@dataclass(slots=True)
class _WriteBack:
    """Dirty bytes of a place, and who waits for them to become fewer."""

    limit_bytes: int | None
    dirty: int = 0
    waiting: list[Callable[[], None]] = field(default_factory=list)

    @property
    def full(self) -> bool:
        return self.limit_bytes is not None and self.dirty > self.limit_bytes


class Modelled:
    """An executor without bytes.

    compute: what a layer takes, from who is attended. turns_ns: how long each turn took. stalls_ns: by path, how long
    the model waited for a copy on it.
    """

    def __init__(self, machine: Machine, compute: Compute) -> None:
        self.machine, self.compute = machine, compute
        self.events = Events()
        self.network = Network(self.events, machine.links)
        places = machine.places.values()
        self.caches = {each.name: PageCache(each.cache_bytes) for each in places if each.cache_bytes is not None}
        self._write_back = {each.name: _WriteBack(each.dirty_bytes) for each in places}
        self._last: dict[str, ModelledCopy] = {}  # in turn on each path
        self._ready_ns: dict[Hashable, int] = {}  # when drives have answered for a request
        self._drives_free_ns = self._began_ns = 0
        self._layer_s = 0.0
        self.moved: Counter[str] = Counter()  # bytes, by path
        self.stalls_ns: Counter[str] = Counter()
        self.turns_ns: list[int] = []

    @property
    def now_ns(self) -> int:
        """Modelled time of the model's own work."""
        return self.events.now_ns

    def begin(self, transfer: Transfer, path: Path, in_turn: bool, urgency: float) -> ModelledCopy:
        copy = ModelledCopy(transfer, path, urgency)
        before = [ticket for ticket in transfer.after if isinstance(ticket, ModelledCopy) and not ticket.done]
        last = self._last.get(path.name) if in_turn else None
        enters_after = last is not None and not last.entered
        copy.waits = len(before) + enters_after

        def go() -> None:
            copy.waits -= 1
            if copy.waits <= 0:
                self._go(copy)

        for ticket in before:
            ticket.when_done.append(go)
        if last is not None and enters_after:
            last.when_entered.append(go)
        if in_turn:
            self._last[path.name] = copy
        if not copy.waits:
            self._go(copy)
        return copy

    def release(self, extent: Extent, place: str, after: tuple[Ticket, ...]) -> None:
        if cache := self.caches.get(place):
            cache.forget(extent)

    def attend(self, attention: Attention) -> None:
        self.wait((*attention.waits, *attention.room))
        ready_ns = max(self._ready_ns.get(row, 0) for row in attention.rows)
        if ready_ns > self.now_ns:
            self.events.run_to(ready_ns)
        work = self.compute(attention)
        self.events.run_to(self.now_ns + work.device_ns)
        if work.drives_ns:
            self._drives_free_ns = max(self._drives_free_ns, self.now_ns) + work.drives_ns
            self._ready_ns |= dict.fromkeys(attention.rows, self._drives_free_ns)
        took_s = (work.device_ns + work.drives_ns) / 1e9
        self._layer_s += (EMA_SHARE if self._layer_s else 1.0) * (took_s - self._layer_s)

    def wait(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            if not ticket.done:
                since_ns = self.now_ns
                self.events.run_until(lambda ticket=ticket: ticket.done)  # type: ignore[misc]  # bound at once
                assert isinstance(ticket, ModelledCopy)
                self.stalls_ns[ticket.path.name] += self.now_ns - since_ns

    def end(self) -> None:
        self.events.run_to(max(self._ready_ns.values(), default=0))
        self.turns_ns.append(self.now_ns - self._began_ns)
        self._began_ns = self.now_ns

    def settle(self) -> None:
        """Let all copies and all writing back end."""
        while (next_ns := self.events.next_ns) is not None:
            self.events.run_to(next_ns)

    def queued_s(self, path: Path) -> float:
        links = self.machine.links
        return max(self.network.queued_bytes(name) / links[name].bytes_per_s for name in path.links)

    def transfer_s(self, path: Path, nbytes: int) -> float:
        links = [self.machine.links[name] for name in path.links]
        return sum(nbytes / link.bytes_per_s + link.start_ns / 1e9 for link in links)

    def layer_s(self) -> float:
        return self._layer_s

    def found(self, place: str) -> tuple[int, int] | None:
        cache = self.caches.get(place)
        return (cache.read_bytes, cache.hit_bytes) if cache else None

    def _go(self, copy: ModelledCopy) -> None:
        """Cut a copy into pieces, and let them enter one after the other."""
        transfer, path = copy.transfer, copy.path
        copy.began_ns = self.now_ns
        row = transfer.row_bytes
        first, end = path.blocks(transfer.first * row, (transfer.first + transfer.tokens) * row)
        self.moved[path.name] += end - first
        size = path.piece_bytes or max(end, 1)
        numbers = range(first // size, -(-end // size)) if end > first else range(0)
        pieces = [(number, max(first, number * size), min(end, (number + 1) * size)) for number in numbers]
        copy.pieces_left = len(pieces)
        if pieces:
            self._enter(copy, pieces, 0)
        else:
            self._entered(copy)
            self._ended(copy)

    def _enter(self, copy: ModelledCopy, pieces: list[tuple[int, int, int]], number: int) -> None:
        """Send a piece over its links; the next one enters when this has left the first."""
        index, first, end = pieces[number]
        links, extent = copy.path.links, copy.transfer.extent
        if cache := self.caches.get(copy.transfer.source):
            offset = index * copy.path.piece_bytes
            if not cache.read((extent, index), end - offset, end - first) and copy.path.missed:
                links = copy.path.missed

        def passed(stage: int) -> None:
            if stage == 1:
                if number + 1 < len(pieces):
                    self._enter(copy, pieces, number + 1)
                else:
                    self._entered(copy)
            if stage < len(links):
                self.network.send(links[stage], end - first, lambda: passed(stage + 1), copy.urgency)
            else:
                self._arrived(copy, index, end - index * copy.path.piece_bytes, end - first)

        passed(0)

    def _arrived(self, copy: ModelledCopy, index: int, held: int, nbytes: int) -> None:
        """A piece has passed its links; what is written back later may have to wait until less is dirty."""
        target = copy.transfer.target
        if cache := self.caches.get(target):
            cache.put((copy.transfer.extent, index), held)

        def over() -> None:
            copy.pieces_left -= 1
            if not copy.pieces_left:
                self._ended(copy)

        if not copy.path.background:
            over()
            return
        back = self._write_back[target]
        back.dirty += nbytes
        self._clean(back, copy.path.background, nbytes)
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
            while back.waiting and not back.full:
                back.waiting.pop(0)()

        passed(0)

    def _entered(self, copy: ModelledCopy) -> None:
        copy.entered = True
        for act in copy.when_entered:
            act()

    def _ended(self, copy: ModelledCopy) -> None:
        copy.done, copy.ended_ns = True, self.now_ns
        for act in copy.when_done:
            act()
