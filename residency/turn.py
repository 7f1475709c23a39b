"""What a policy is a function of: one iteration of a batch, written down as a short program.

`attend` stands in the order of the model's layers; a copy starts at once beside it; its ticket joins them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from residency.executor import Act, Attention, Executor, Recorded
from residency.machine import DEVICE, Machine, Path
from residency.table import Extent, Refused, Table, Ticket

Policy = Callable[["Turn"], None]
Plan = Callable[[int], Sequence[Hashable]]


@dataclass(slots=True)
class Counts:
    """Traffic on a path. bytes in whole blocks."""

    copies: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Residency:
    """Where the KV of a run of turns lives, and who decides it.

    parts: what each layer of a request has: K and V apart, or together. plan: who is due in k iterations. final_tokens:
    how long a request is going to be; 0 is not known. recorded: what was done, where that is wanted: an empty list.
    now: the turn that is under way, or was last.
    """

    machine: Machine
    layers: range
    policy: Policy
    executor: Executor
    parts: tuple[str, ...] = ("k", "v")
    plan: Plan | None = None
    final_tokens: int = 0
    table: Table = field(init=False)
    memory: dict[str, Any] = field(default_factory=dict)
    traffic: dict[str, Counts] = field(default_factory=dict)
    turns: int = 0
    recorded: list[Recorded] | None = None
    now: Turn | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.table = Table(self.machine.places, self.executor.release)

    def turn(self, new: Mapping[Hashable, int], row_bytes: Mapping[Hashable, int]) -> None:
        """Run the policy for an iteration in which each request gets so many new tokens.

        row_bytes: of one token of one part of a request. Raises Refused for what the table forbids, and where not
        every layer of every request was attended.
        """
        turn = self.now = Turn(self, self.turns, dict(new), dict(row_bytes))
        self.turns += 1
        if self.recorded is not None:
            self.recorded.append(Recorded(new, row_bytes, turn.acts))
        try:
            self.policy(turn)
            turn.end()
        finally:
            turn.over = True
        self.executor.end()

    def abandon(self) -> None:
        """Nothing more is done in the turn that is under way, whatever its policy goes on with."""
        if self.now:
            self.now.over = True

    def rewrite(self, extent: Extent, place: str) -> None:
        """What is attended at a place has been changed there: its rows stand in another order."""
        self.table.rewritten(extent, place)
        if self.recorded:
            self.recorded[-1].acts.append(Act("rewrite", place, extent))

    def crop(self, extent: Extent, tokens: int) -> None:
        """Forget all but the first tokens of an extent of which nothing is under way."""
        self.table.crop(extent, tokens)
        self._between(Act("crop", extent=extent, tokens=tokens))

    def free(self, request: Hashable) -> None:
        """Forget a request."""
        self.table.free(request)
        self._between(Act("free", rows=(request,)))

    def _between(self, act: Act) -> None:
        if self.recorded is not None:
            self.recorded.append(Recorded({}, {}, [act]))

    def path(self, source: str, target: str) -> Path:
        """The path between two places; raises Refused."""
        try:
            return self.machine.paths[source, target]
        except KeyError:
            raise Refused(f"there is no path from {source} to {target}") from None


class Turn:
    """One iteration, as a policy sees it: it asks, copies, drops, attends.

    batch: the requests that are computed. new: how many tokens each gets, 1 in decode, more in prefill. memory: the
    policy's own, kept between turns. over: nothing is done in it any more.
    """

    def __init__(self, run: Residency, number: int, new: dict[Hashable, int], row_bytes: dict[Hashable, int]) -> None:
        self._run, self.number, self.new, self._row_bytes = run, number, MappingProxyType(new), row_bytes
        self.batch, self.layers, self.memory = tuple(new), run.layers, run.memory
        self.acts: list[Act] = []
        self._copies: dict[int, int] = {}  # by ticket, which act it is of
        self.over = False
        self._next = dict.fromkeys(self.batch, self.layers.start)

    # What a policy may ask

    @property
    def parts(self) -> tuple[str, ...]:
        """What a layer of a request consists of, in the order in which it should come."""
        return self._run.parts

    @property
    def prefill(self) -> bool:
        """Whether some request gets more than one token."""
        return any(count > 1 for count in self.new.values())

    @property
    def final_tokens(self) -> int:
        """How long a request is going to be, as far as is known: 0 where it is not."""
        return self._run.final_tokens

    def plan(self, k: int) -> Sequence[Hashable]:
        """The requests that are due in k iterations."""
        return self.batch if self._run.plan is None else self._run.plan(self.number + k)

    def next_use(self, extent: Extent, horizon: int = 64) -> int | None:
        """In how many iterations an extent is due; None: not in so many."""
        return next((k for k in range(horizon) if extent.request in self.plan(k)), None)

    def extents(self, layer: int, requests: Iterable[Hashable] | None = None) -> list[Extent]:
        """What there is of a layer of the batch, or of other requests: parts first, then requests."""
        wanted = self.batch if requests is None else list(requests)
        return [extent for part in self.parts for request in wanted for extent in self._blocks(request, layer, part)]

    def tokens(self, extent: Extent) -> int:
        """Tokens of an extent."""
        return self._run.table[extent].tokens

    def nbytes(self, extent: Extent, tokens: int | None = None) -> int:
        """Bytes of an extent now, or with so many tokens."""
        entry = self._run.table[extent]
        return (entry.tokens if tokens is None else tokens) * entry.row_bytes

    def layer_bytes(self, tokens: int | None = None) -> int:
        """Bytes of all parts of one layer of the batch; tokens: of each request, None is after this turn."""

        def length(request: Hashable) -> int:
            stored = self._blocks(request, self.layers.start, self.parts[0])
            return sum(map(self.tokens, stored)) + self.new[request]

        rows = ((length(r) if tokens is None else tokens) * self._row_bytes[r] for r in self.batch)
        return len(self.parts) * sum(rows)

    def lacking(self, extent: Extent, place: str) -> int:
        """Bytes of an extent that a place has not."""
        entry = self._run.table[extent]
        copy = entry.copies.get(place)
        return (entry.tokens - (copy.tokens if copy else 0)) * entry.row_bytes

    def new_bytes(self, request: Hashable) -> int:
        """Bytes of one part of a layer that a request of the batch gets in this turn."""
        return self.new[request] * self._row_bytes[request]

    def where(self, extent: Extent) -> tuple[str, ...]:
        """Places that hold all of an extent, or are going to."""
        return self._run.table.where(extent)

    def last_use(self, extent: Extent) -> int:
        """The turn that attended an extent last."""
        return self._run.table[extent].used

    def held(self, place: str) -> list[Extent]:
        """Extents that a place holds, the least recently attended first; of those layers that are due later first."""
        entries = self._run.table.entries
        here = [extent for extent, entry in entries.items() if place in entry.copies]
        return sorted(here, key=lambda extent: (entries[extent].used, -extent.layer))

    def room(self, place: str) -> float:
        """Bytes that a place has left."""
        return self._run.table.room(place)

    def capacity(self, place: str) -> float:
        """Bytes that a place keeps: its limit, or what the kernel keeps in memory of its files."""
        spec = self._run.machine.places[place]
        sizes = [size for size in (spec.limit_bytes, spec.cache_bytes) if size is not None]
        return min(sizes) if sizes else float("inf")

    def has_path(self, source: str, target: str) -> bool:
        """Whether bytes may move from one place to another."""
        return (source, target) in self._run.machine.paths

    def queued_s(self, source: str, target: str) -> float:
        """Seconds of what is under way on a path."""
        return self._run.executor.queued_s(self._run.path(source, target))

    def transfer_s(self, source: str, target: str, nbytes: int) -> float:
        """Seconds of a copy that has the path for itself."""
        return self._run.executor.transfer_s(self._run.path(source, target), nbytes)

    def layer_s(self) -> float:
        """Seconds of a layer without waiting, lately."""
        return self._run.executor.layer_s()

    def found(self, place: str) -> tuple[int, int] | None:
        """Bytes of a place's files that were read so far, and of these what the page cache had; None: nobody knows."""
        return self._run.executor.found(place)

    # What a policy may do

    def copy(
        self,
        extent: Extent,
        to: str,
        *,
        source: str | None = None,
        urgency: float = 0.0,
        in_turn: bool = False,
        after: Iterable[Ticket] = (),
    ) -> Ticket | None:
        """Let a place have all of an extent too; None where it has.

        source: None is the fastest of those that have it. Tokens that the place has are not moved again. after: copies
        that end before it begins.
        """
        run = self._open()
        where = run.table.where(extent)
        if to in where:
            return None
        sources = [place for place in where if self.has_path(place, to)]
        if not sources:
            raise Refused(f"{extent}: there is no path from {' or '.join(where)} to {to}")
        if source is None:
            size = self.nbytes(extent)
            source = min(sources, key=lambda place: self.transfer_s(place, to, size))
        path, urgency = run.path(source, to), float(urgency)
        before = [ticket for ticket in after if not ticket.done]
        transfer = run.table.copy(extent, source, to)
        transfer = replace(transfer, after=(*transfer.after, *before))
        try:
            ticket = run.executor.begin(transfer, path, in_turn, urgency)
        except BaseException:
            run.table.not_begun(transfer)
            raise
        run.table.begun(transfer, ticket)
        numbers = tuple(self._copies[id(each)] for each in before if id(each) in self._copies)
        self._copies[id(ticket)] = len(self.acts)
        self.acts.append(Act("copy", to, extent, source, in_turn, after=numbers))
        first, end = path.blocks(transfer.first * transfer.row_bytes, self.nbytes(extent))
        counts = run.traffic.setdefault(path.name, Counts())
        counts.copies += 1
        counts.bytes += end - first
        return ticket

    def drop(self, extent: Extent, at: str) -> None:
        """Give up a copy that is not the last whole one."""
        self._open().table.drop(extent, at)
        self.acts.append(Act("drop", at, extent))

    def move(self, extent: Extent, to: str, *, urgency: float = 0.0, in_turn: bool = False) -> Ticket | None:
        """Copy an extent to a place, and give up all its copies elsewhere."""
        ticket = self.copy(extent, to, urgency=urgency, in_turn=in_turn)
        for place in list(self._run.table[extent].copies):
            if place != to:
                self.drop(extent, place)
        return ticket

    def wait(self, *tickets: Ticket | None) -> None:
        """Let the model wait for copies."""
        self._run.executor.wait([ticket for ticket in tickets if ticket is not None])

    def attend(
        self,
        layer: int,
        rows: Iterable[Hashable] | None = None,
        at: str | tuple[str, ...] = DEVICE,
        method: str = "dense",
    ) -> None:
        """Compute a layer of the batch, or of some of it; its K and V must be at that place, or on their way.

        The new tokens' K and V are born there. at: where rows have several blocks, the place of each, of which the last
        one grows; one more than there are begins a block. What comes of blocks is merged.
        """
        run, wanted = self._open(), self.batch if rows is None else tuple(rows)
        places = (at,) if isinstance(at, str) else tuple(at)
        for row in wanted:
            if self._next.get(row) != layer:
                due = f"layer {self._next[row]} is due" if row in self._next else "it is not in this turn"
                raise Refused(f"attend(layer {layer}) of request {row}: {due}")
            self._next[row] = layer + 1
        room = [ticket for row in wanted for part in self.parts for ticket in self._grow(row, layer, part, places)]
        extents = self.extents(layer, wanted)
        waits = [
            ticket
            for block, place in enumerate(places)
            for ticket in run.table.attend([each for each in extents if each.block == block], place, self.number)
        ]
        self.acts.append(Act("attend", places=places, layer=layer, rows=wanted, method=method))
        try:
            run.executor.attend(Attention(layer, wanted, places, method, tuple(extents), tuple(waits), tuple(room)))
        finally:
            run.table.attended(extents)

    def _grow(self, row: Hashable, layer: int, part: str, places: tuple[str, ...]) -> list[Ticket]:
        """New tokens of a row, in the last of as many blocks as there are places; who still uses their bytes."""
        table, last = self._run.table, Extent(row, layer, part, len(places) - 1)
        blocks = len(self._blocks(row, layer, part))
        if blocks not in (len(places) - 1, len(places)):
            raise Refused(f"attend(layer {layer}) of request {row}: it has {blocks} blocks, not {len(places)}")
        if last not in table.entries:
            table.add(last, self._row_bytes[row], places[-1])
        return table.grow(last, places[-1], self.new[row])

    def _blocks(self, request: Hashable, layer: int, part: str) -> list[Extent]:
        """What a request has of a part of a layer."""
        every = (Extent(request, layer, part, block) for block in itertools.count())
        return list(itertools.takewhile(lambda extent: extent in self._run.table.entries, every))

    def _open(self) -> Residency:
        """The run; raises Refused where this turn is over."""
        if self.over:
            raise Refused(f"turn {self.number} is over: nothing is done in it any more")
        return self._run

    def end(self) -> None:
        """Raise Refused where the policy left a layer out."""
        for row, layer in self._next.items():
            if layer != self.layers.stop:
                raise Refused(f"the policy ended its turn before layer {layer} of request {row} was attended")
