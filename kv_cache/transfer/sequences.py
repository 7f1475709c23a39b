"""Whole sequences in three tiers: where each KV cache lies, which copies are under way, and how long they take."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum

from kv_cache.hardware import DEVICE, HOST
from kv_cache.request import SequenceState


class Level(IntEnum):
    """Where the KV cache of a sequence lies, the nearest tier first."""

    DEVICE = 0
    HOST = 1
    FLASH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Capacities of three tiers, and the two links between them: to host memory, and from there to flash.

    Attributes:
        token_bytes: Bytes of the KV cache per token, all layers.
        block_tokens: Tokens of a block; whole blocks are stored.
        device_bytes, host_bytes, flash_bytes: Capacities.
        host_bytes_per_s, flash_bytes_per_s: Rates of the links; each carries one copy at a time.
        host_start_s, flash_start_s: Fixed seconds of a copy.
        longest_tokens: Tokens of the longest sequence to come.
    """

    token_bytes: int
    block_tokens: int = 16
    device_bytes: int
    host_bytes: int
    flash_bytes: int
    host_bytes_per_s: float
    host_start_s: float = 0.0
    flash_bytes_per_s: float
    flash_start_s: float = 0.0
    longest_tokens: int = 1

    def __post_init__(self) -> None:
        for name in ("token_bytes", "block_tokens", "device_bytes", "host_bytes", "flash_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        for name in ("host_bytes_per_s", "flash_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be above 0")

    def bytes_of(self, tokens: int) -> int:
        """Whole blocks."""
        return -(-tokens // self.block_tokens) * self.block_tokens * self.token_bytes

    def rooms(self) -> list[int]:
        """By tier."""
        return [self.device_bytes, self.host_bytes, self.flash_bytes]

    def with_limits(self, limits: Mapping[str, int]) -> Levels:
        """The same with other capacities of the device and of host memory, bytes by tier."""
        device, host = limits.get(DEVICE, self.device_bytes), limits.get(HOST, self.host_bytes)
        return replace(self, device_bytes=max(1, device), host_bytes=max(1, host))

    def copy_s(self, by: Level, size: int) -> float:
        """A copy over the link that leads to a tier."""
        if by is Level.HOST:
            return self.host_start_s + size / self.host_bytes_per_s
        return self.flash_start_s + size / self.flash_bytes_per_s

    def without_copies(self) -> Levels:
        """The same where copies take no time."""
        fast = math.nextafter(math.inf, 0)
        return replace(self, host_bytes_per_s=fast, flash_bytes_per_s=fast, host_start_s=0.0, flash_start_s=0.0)

    def holds(self, tokens: int) -> bool:
        """Whether each tier can hold a request of so many tokens."""
        return self.bytes_of(tokens) <= min(self.rooms())

    def check(self, tokens: int, number: int) -> None:
        """Raise ValueError for a request of so many tokens that one of the tiers cannot hold."""
        size = self.bytes_of(tokens)
        for level, capacity in zip(Level, self.rooms(), strict=True):
            if size > capacity:
                raise ValueError(
                    f"request {number}: {size / 1e6:,.2f} MB of KV cache, and the tier {level.name.lower()} has "
                    f"{capacity / 1e6:,.2f} MB: give it more"
                )


@dataclass(slots=True, eq=False)
class Kv:
    """The KV cache of a sequence, which moves as one.

    Attributes:
        sequence: Its tokens.
        room: Bytes on the device that it needs in the end.
        level: Where it lies; None if nothing of it is stored.
        move: The copy under way.
        pinned: Whether the sequence decodes, or is the next to.
        turn: Tokens made since it came to the device.
        used: Iteration that used it last.
        uses: Number of times that it came.
        staged: Whether it was copied towards the device and not used since.
        entered_s, left_s: When it came and went last.
    """

    sequence: SequenceState
    room: int
    level: Level | None = None
    move: Move | None = None
    pinned: bool = False
    turn: int = 0
    used: int = -1
    uses: int = 0
    staged: bool = False
    entered_s: float = 0.0
    left_s: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens that are stored, or that have to be computed."""
        return self.sequence.num_tokens

    @property
    def absent(self) -> bool:
        """Whether nothing of it is computed, or all of it was given up."""
        return not self.sequence.num_computed_tokens

    @property
    def is_here(self) -> bool:
        """Whether it may decode: all is on the device, or has room to be computed there."""
        return self.level is Level.DEVICE and self.move is None


@dataclass(slots=True, eq=False)
class Move:
    """A copy to another level, or room taken on the device where there is nothing to copy. Less urgency goes first."""

    urgency: int
    number: int
    kv: Kv
    to: Level
    size: int
    links: tuple[Level, ...]
    end_s: float | None = None

    def __lt__(self, other: Move) -> bool:
        return (self.urgency, self.number) < (other.urgency, other.number)

    @property
    def goes_down(self) -> bool:
        return self.kv.level is not None and self.to > self.kv.level


@dataclass(slots=True)
class Carried:
    """What a link has done."""

    bytes: int = 0
    busy_s: float = 0.0


@dataclass(slots=True)
class SequenceStore:
    """A byte is in one level, and room at a copy's target is taken when it begins, at its source given up when it ends.

    A link carries one copy at a time: the most urgent for which there is room. What goes between device and flash
    occupies both links as long as the slower needs.
    """

    levels: Levels
    now_s: float = 0.0
    free: list[int] = field(default_factory=list)
    waiting: list[Move] = field(default_factory=list)
    running: list[Move] = field(default_factory=list)
    carried: dict[Level, Carried] = field(default_factory=lambda: {Level.HOST: Carried(), Level.FLASH: Carried()})
    _number: int = 0

    def __post_init__(self) -> None:
        self.free = self.levels.rooms()

    def set_levels(self, levels: Levels) -> None:
        """Change the tiers' capacities. A tier over its new capacity takes nothing until KV caches have left it."""
        before, self.levels = self.levels.rooms(), levels
        self.free = [free + now - old for free, now, old in zip(self.free, levels.rooms(), before, strict=True)]
        self._start()

    def size(self, kv: Kv, level: Level) -> int:
        """What K and V take there."""
        return kv.room if level is Level.DEVICE else self.levels.bytes_of(kv.tokens)

    def room(self, level: Level) -> int:
        """Free, or about to be, and not spoken for. What waits to go up frees nothing: it may wait for this room."""
        leaving = sum(
            self.size(move.kv, level)
            for move in (*self.running, *self.waiting)
            if move.kv.level is level and (move.end_s is not None or move.goes_down)
        )
        return self.free[level] + leaving - sum(self.size(move.kv, level) for move in self.waiting if move.to is level)

    def move(self, kv: Kv, to: Level, urgency: int) -> None:
        """Have K and V copied as soon as a link and room are free."""
        links = (
            ()
            if kv.level is None
            else tuple(Level(each) for each in range(min(kv.level, to) + 1, max(kv.level, to) + 1))
        )
        size = self.levels.bytes_of(kv.tokens) if links else 0
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
        assert kv.level is not None and kv.move is None
        self.free[kv.level] += self.size(kv, kv.level)
        kv.level = None
        self._start()

    def withdraw(self, kv: Kv) -> None:
        """Give up K and V, wherever they are: a copy that has begun ends first."""
        if kv.move and kv.move.end_s is None:
            self.waiting.remove(kv.move)
            kv.move = None
        while kv.move:
            self.step()
        if kv.level is not None:
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
                takes_s = max((self.levels.copy_s(link, move.size) for link in move.links), default=0.0)
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
        if kv.level is not None:
            self.free[kv.level] += self.size(kv, kv.level)
        kv.level, kv.move = move.to, None
