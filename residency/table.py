"""Who is where: the table of extents and their copies, and the rules that no policy can break.

It knows neither clocks nor bytes. A *ticket* is whatever an executor gives for a copy under way.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from residency.machine import Place

K, V, WEIGHTS = "k", "v", "weights"


class Refused(ValueError):
    """A policy asked for what the table forbids, with the reason."""


class Ticket(Protocol):
    """A copy under way."""

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        ...

    @property
    def failed(self) -> bool:
        """Whether it has ended, or is going to, without what it was to bring."""
        ...

    @property
    def began_ns(self) -> int:
        """When it could begin: those that it waits for had ended."""
        ...

    @property
    def ended_ns(self) -> int:
        """When it had ended."""
        ...


@dataclass(frozen=True, slots=True)
class Extent:
    """K or V of a run of tokens of one layer of a request, or a layer's weights: what moves as one.

    request: a sequence, a batch that is kept together, or a shared prefix. block: which run of tokens, from 0.
    """

    request: Hashable
    layer: int
    part: str = K
    block: int = 0

    def __str__(self) -> str:
        more = f", block {self.block}" if self.block else ""
        return f"{self.part} of request {self.request}, layer {self.layer}{more}"


Left = Callable[[Extent, str, tuple[Ticket, ...]], None]


@dataclass(slots=True)
class Copy:
    """An extent at a place: its first `tokens`, of which the last may still arrive."""

    tokens: int
    arriving: list[Ticket] = field(default_factory=list)
    readers: list[Ticket] = field(default_factory=list)


@dataclass(slots=True)
class Entry:
    """An extent: how many tokens it has, each of so many bytes, and where."""

    row_bytes: int
    tokens: int = 0
    copies: dict[str, Copy] = field(default_factory=dict)
    attended: int = 0
    used: int = 0  # the turn that attended it last


@dataclass(frozen=True, slots=True)
class Transfer:
    """Tokens [first, first + tokens) of an extent, from one place to another, when those in `after` have ended.

    needs: of those, whose bytes it is about; without them it is nothing. The others only use the room until they end.
    """

    extent: Extent
    source: str
    target: str
    first: int
    tokens: int
    row_bytes: int
    after: tuple[Ticket, ...]
    needs: tuple[Ticket, ...]


class Table:
    """Extents and their copies.

    The rules: no place holds more than its limit; who takes room that somebody still leaves waits for that to end;
    nothing moves while it is attended; the last whole copy is never dropped.
    """

    def __init__(self, places: Mapping[str, Place], left: Left | None = None) -> None:
        """left: called for a copy that has been given up, with the tickets of those that still use it."""
        self.places, self._left = places, left
        self.entries: dict[Extent, Entry] = {}
        self.used: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._leaving: dict[str, deque[tuple[int, tuple[Ticket, ...]]]] = {name: deque() for name in places}

    def __getitem__(self, extent: Extent) -> Entry:
        try:
            return self.entries[extent]
        except KeyError:
            raise Refused(f"{extent}: there is no such extent") from None

    def room(self, place: str) -> float:
        """Bytes that may still be taken; those that somebody leaves count as free."""
        limit = self._place(place).limit_bytes
        return float("inf") if limit is None else limit - self.used[place]

    def where(self, extent: Extent) -> tuple[str, ...]:
        """Places that hold all of it, or are going to."""
        entry = self[extent]
        return tuple(name for name, copy in entry.copies.items() if copy.tokens == entry.tokens)

    def add(self, extent: Extent, row_bytes: int, place: str, tokens: int = 0) -> list[Ticket]:
        """A new extent; whoever writes there waits for the tickets returned."""
        if extent in self.entries:
            raise Refused(f"{extent} is there already")
        waits = self._take(place, tokens * row_bytes)
        self.entries[extent] = Entry(row_bytes, tokens, {place: Copy(tokens)})
        return waits

    def grow(self, extent: Extent, place: str, tokens: int) -> list[Ticket]:
        """Tokens were computed at a place, which holds all of them up to there; the other copies are behind now."""
        entry = self[extent]
        copy = self._whole(extent, place)
        waits = self._take(place, tokens * entry.row_bytes)
        copy.tokens += tokens
        entry.tokens += tokens
        return waits

    def copy(self, extent: Extent, source: str, target: str) -> Transfer:
        """Let a place have all of an extent; what it has already is not moved again."""
        self._place(target)
        entry, there = self[extent], self._whole(extent, source)
        self._check_attended(extent, entry)
        here = entry.copies.get(target)
        first = here.tokens if here else 0
        waits = self._take(target, (entry.tokens - first) * entry.row_bytes)
        here = entry.copies.setdefault(target, Copy(0))
        here.tokens = entry.tokens
        needs = tuple(_missing([*there.arriving, *here.arriving]))
        after = (*waits, *needs, *_pending(here.readers))
        return Transfer(extent, source, target, first, entry.tokens - first, entry.row_bytes, after, needs)

    def not_begun(self, transfer: Transfer) -> None:
        """A transfer cannot begin: its target has what it had before."""
        extent, target = transfer.extent, transfer.target
        self.used[target] -= transfer.tokens * transfer.row_bytes
        self[extent].copies[target].tokens = transfer.first
        if not transfer.first:
            self._leave(extent, target)

    def begun(self, transfer: Transfer, ticket: Ticket) -> None:
        """A transfer is under way."""
        copies = self[transfer.extent].copies
        target, source = copies[transfer.target], copies[transfer.source]
        target.arriving = [*_missing(target.arriving), ticket]
        source.readers = [*_pending(source.readers), ticket]

    def drop(self, extent: Extent, place: str) -> None:
        """Give up a copy; its room is free for those who wait for whoever still reads it."""
        entry = self[extent]
        self._check_attended(extent, entry)
        copy = entry.copies.get(place)
        if copy is None:
            raise Refused(f"{extent}: nothing of it is at {place}")
        if copy.tokens == entry.tokens and self.where(extent) == (place,):
            raise Refused(f"{extent}: {place} has the last whole copy of it, which cannot be dropped")
        self._leave(extent, place)

    def attend(self, extents: Iterable[Extent], place: str, turn: int) -> list[Ticket]:
        """They are attended at a place from now on; begins when the tickets have ended."""
        if not self._place(place).attends:
            raise Refused(f"{place} does not attend")
        waits: list[Ticket] = []
        wanted = list(extents)
        for extent in wanted:
            waits += _missing(self._whole(extent, place).arriving)
        for extent in wanted:
            self.entries[extent].attended += 1
            self.entries[extent].used = turn
        return waits

    def attended(self, extents: Iterable[Extent]) -> None:
        """They are attended no longer."""
        for extent in extents:
            self.entries[extent].attended -= 1

    def crop(self, extent: Extent, tokens: int) -> None:
        """Forget all but the first tokens; nothing of it may be under way."""
        entry = self[extent]
        for place, copy in entry.copies.items():
            keep = min(copy.tokens, tokens)
            self.used[place] -= (copy.tokens - keep) * entry.row_bytes
            copy.tokens = keep
        entry.tokens = min(entry.tokens, tokens)

    def rewritten(self, extent: Extent, place: str) -> None:
        """All of it was changed at a place: other copies are of no use."""
        self._whole(extent, place)
        for other in set(self[extent].copies) - {place}:
            self._leave(extent, other)

    def free(self, request: Hashable) -> None:
        """Forget a request."""
        for extent in [extent for extent in self.entries if extent.request == request]:
            for place in list(self.entries[extent].copies):
                self._leave(extent, place)
            del self.entries[extent]

    def check(self) -> None:
        """Raise AssertionError where the books do not balance."""
        held: Counter[str] = Counter()
        for extent, entry in self.entries.items():
            assert self.where(extent), f"{extent} is nowhere whole"
            for place, copy in entry.copies.items():
                held[place] += copy.tokens * entry.row_bytes
        assert all(held[place] == self.used[place] for place in self.places), (held, self.used)
        for name, spec in self.places.items():
            assert spec.limit_bytes is None or self.used[name] <= spec.limit_bytes, name

    def _leave(self, extent: Extent, place: str) -> None:
        entry = self.entries[extent]
        copy = entry.copies.pop(place)
        nbytes = copy.tokens * entry.row_bytes
        self.used[place] -= nbytes
        still = tuple(_pending([*copy.readers, *copy.arriving]))
        if still:
            self._leaving[place].append((nbytes, still))
        if self._left:
            self._left(extent, place, still)

    def _take(self, place: str, nbytes: int) -> list[Ticket]:
        """Count bytes as used; whose end must be waited for before they are there."""
        limit = self._place(place).limit_bytes
        if nbytes > self.room(place):
            free = self.room(place)
            raise Refused(f"{place} is full: {nbytes:,} bytes are wanted, {free:,.0f} of {limit:,} are free")
        self.used[place] += nbytes
        self.peak[place] = max(self.peak[place], self.used[place])
        leaving = self._leaving[place]
        left = deque(each for each in leaving if not all(ticket.done for ticket in each[1]))
        self._leaving[place] = left
        if limit is None:
            return []
        waits: list[Ticket] = []
        over = self.used[place] + sum(size for size, _ in left) - limit
        for size, tickets in left:
            if over <= 0:
                break
            waits += tickets
            over -= size
        return waits

    def _whole(self, extent: Extent, place: str) -> Copy:
        entry = self[extent]
        copy = entry.copies.get(place)
        if copy is None or copy.tokens < entry.tokens:
            has = f"{copy.tokens} of its {entry.tokens} tokens" if copy else "nothing of it"
            raise Refused(f"{extent}: {self._place(place).name} has {has}")
        return copy

    def _place(self, name: str) -> Place:
        try:
            return self.places[name]
        except KeyError:
            raise Refused(f"there is no place {name!r}: there are {', '.join(self.places)}") from None

    @staticmethod
    def _check_attended(extent: Extent, entry: Entry) -> None:
        if entry.attended:
            raise Refused(f"{extent} is attended: it cannot move now")


def _pending(tickets: Iterable[Ticket]) -> list[Ticket]:
    """Those that still use bytes."""
    return [ticket for ticket in tickets if not ticket.done]


def _missing(tickets: Iterable[Ticket]) -> list[Ticket]:
    """Those whose bytes are not there: they are under way, or never come."""
    return [ticket for ticket in tickets if ticket.failed or not ticket.done]
