"""Tiers and links: where K and V of each request are, what is under way, and what time that takes."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from kv_cache.tiered.machine import Machine, Tier
from kv_cache.trace import Request


@dataclass(slots=True, eq=False)
class Kv:
    """K and V of a request, which move as one.

    tokens: stored, or to be computed where they are absent. room: on the device, kept for all tokens that there may be.
    absent: not computed, or given up. pinned: it decodes, or is the next to do so. turn: tokens made since it came.
    used, uses: in which iteration last, and how often it has come. staged: it has been copied towards the device, and
    not been used since. entered_s, left_s: when it came last, and went.
    """

    request: Request
    room: int
    tokens: int
    made: int = 0
    absent: bool = True
    tier: Tier | None = None
    move: Move | None = None
    pinned: bool = False
    turn: int = 0
    used: int = -1
    uses: int = 0
    staged: bool = False
    entered_s: float = 0.0
    left_s: float = 0.0

    @property
    def is_here(self) -> bool:
        """Whether it may decode: all is on the device, or has room to be computed there."""
        return self.tier is Tier.DEVICE and self.move is None

    def grow(self) -> None:
        """A token was made."""
        self.tokens += 1
        self.made += 1
        self.turn += 1


@dataclass(slots=True, eq=False)
class Move:
    """A copy to another tier, or room taken on the device where there is nothing to copy. Less urgency goes first."""

    urgency: int
    number: int
    kv: Kv
    to: Tier
    size: int
    links: tuple[Tier, ...]
    end_s: float | None = None

    def __lt__(self, other: Move) -> bool:
        return (self.urgency, self.number) < (other.urgency, other.number)

    @property
    def goes_down(self) -> bool:
        return self.kv.tier is not None and self.to > self.kv.tier


@dataclass(slots=True)
class Carried:
    """What a link has done."""

    bytes: int = 0
    busy_s: float = 0.0


@dataclass(slots=True)
class Store:
    """A byte is in one tier, and room at a copy's target is taken when it begins, at its source given up when it ends.

    A link carries one copy at a time: the most urgent for which there is room. What goes between device and flash
    occupies both links as long as the slower needs.
    """

    machine: Machine
    now_s: float = 0.0
    free: list[int] = field(default_factory=list)
    waiting: list[Move] = field(default_factory=list)
    running: list[Move] = field(default_factory=list)
    carried: dict[Tier, Carried] = field(default_factory=lambda: {Tier.HOST: Carried(), Tier.FLASH: Carried()})
    _number: int = 0

    def __post_init__(self) -> None:
        self.free = self.machine.rooms()

    def size(self, kv: Kv, tier: Tier) -> int:
        """What K and V take there."""
        return kv.room if tier is Tier.DEVICE else self.machine.bytes_of(kv.tokens)

    def room(self, tier: Tier) -> int:
        """Free, or about to be, and not spoken for. What waits to go up frees nothing: it may wait for this room."""
        leaving = sum(
            self.size(move.kv, tier)
            for move in (*self.running, *self.waiting)
            if move.kv.tier is tier and (move.end_s is not None or move.goes_down)
        )
        return self.free[tier] + leaving - sum(self.size(move.kv, tier) for move in self.waiting if move.to is tier)

    def move(self, kv: Kv, to: Tier, urgency: int) -> None:
        """Have K and V copied as soon as a link and room are free."""
        links = (
            () if kv.tier is None else tuple(Tier(each) for each in range(min(kv.tier, to) + 1, max(kv.tier, to) + 1))
        )
        size = self.machine.bytes_of(kv.tokens) if links else 0
        self._number += 1
        kv.move = Move(urgency, self._number, kv, to, size, links)
        insort(self.waiting, kv.move)
        self._start()

    def hurry(self, move: Move, urgency: int) -> None:
        """Have a copy that waits go before others."""
        if urgency < move.urgency and move.end_s is None:
            self.waiting.remove(move)
            move.urgency = urgency
            insort(self.waiting, move)

    def drop(self, kv: Kv) -> None:
        """Give up K and V, all of them."""
        assert kv.tier is not None and kv.move is None
        self.free[kv.tier] += self.size(kv, kv.tier)
        kv.tier = None
        self._start()

    def withdraw(self, kv: Kv) -> None:
        """Give up K and V, wherever they are: a copy that has begun ends first."""
        if kv.move and kv.move.end_s is None:
            self.waiting.remove(kv.move)
            kv.move = None
        while kv.move:
            self.step()
        if kv.tier is not None:
            self.drop(kv)

    def step(self) -> bool:
        """Go on to when the next copies end; False if nothing is under way."""
        if not self.running:
            return False
        self.run_until(min(move.end_s or 0.0 for move in self.running))
        return True

    def run_until(self, end_s: float) -> None:
        """Let time pass."""
        while self.running:
            first = min(self.running, key=lambda move: (move.end_s, move.number))
            assert first.end_s is not None
            if first.end_s > end_s:
                break
            self.now_s = max(self.now_s, first.end_s)
            self.running.remove(first)
            self._end(first)
            self._start()
        self.now_s = max(self.now_s, end_s)

    def _start(self) -> None:
        for move in list(self.waiting):
            idle = all(link not in other.links for other in self.running for link in move.links)
            if idle and self.free[move.to] >= (taken := self.size(move.kv, move.to)):
                self.waiting.remove(move)
                self.free[move.to] -= taken
                takes_s = max((self.machine.copy_s(link, move.size) for link in move.links), default=0.0)
                move.end_s = self.now_s + takes_s
                for link in move.links:
                    self.carried[link].bytes += move.size
                    self.carried[link].busy_s += takes_s
                if move.links:
                    self.running.append(move)
                else:
                    self._end(move)

    def _end(self, move: Move) -> None:
        kv = move.kv
        if kv.tier is not None:
            self.free[kv.tier] += self.size(kv, kv.tier)
        kv.tier, kv.move = move.to, None
