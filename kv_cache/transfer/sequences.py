"""Whole sequences in three tiers: the tier of each KV cache, copies in flight, and their times."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum

from kv_cache.hardware import DEVICE, HOST
from kv_cache.request import SequenceState


class Level(IntEnum):
    """Tier of the KV cache of a sequence, fastest first."""

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
        host_bytes_per_s, flash_bytes_per_s: Bandwidths of the links; each carries one copy at a time.
        host_start_s, flash_start_s: Latency of a copy, seconds.
        longest_tokens: Length of the longest future sequence, tokens.
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
        """Bytes of a KV cache, in whole blocks."""
        return -(-tokens // self.block_tokens) * self.block_tokens * self.token_bytes

    def capacities(self) -> list[int]:
        """Capacities by tier, bytes."""
        return [self.device_bytes, self.host_bytes, self.flash_bytes]

    def with_limits(self, limits: Mapping[str, int]) -> Levels:
        """Copy with other capacities of the device and host memory, bytes by tier."""
        device, host = limits.get(DEVICE, self.device_bytes), limits.get(HOST, self.host_bytes)
        return replace(self, device_bytes=max(1, device), host_bytes=max(1, host))

    def copy_s(self, by: Level, size: int) -> float:
        """Time of a copy of `size` bytes over the link to a tier, seconds."""
        if by is Level.HOST:
            return self.host_start_s + size / self.host_bytes_per_s
        return self.flash_start_s + size / self.flash_bytes_per_s

    def with_instant_copies(self) -> Levels:
        """Copy with links that take no time."""
        fast = math.nextafter(math.inf, 0)
        return replace(self, host_bytes_per_s=fast, flash_bytes_per_s=fast, host_start_s=0.0, flash_start_s=0.0)

    def holds(self, tokens: int) -> bool:
        """Whether each tier can hold a request of `tokens` tokens."""
        return self.bytes_of(tokens) <= min(self.capacities())

    def check(self, tokens: int, number: int) -> None:
        """Raise ValueError if a tier cannot hold a request of `tokens` tokens."""
        size = self.bytes_of(tokens)
        for level, capacity in zip(Level, self.capacities(), strict=True):
            if size > capacity:
                raise ValueError(
                    f"request {number}: {size / 1e6:,.2f} MB of KV cache, and the tier {level.name.lower()} has "
                    f"{capacity / 1e6:,.2f} MB: give it more"
                )


@dataclass(slots=True, eq=False)
class Kv:
    """KV cache of a sequence, which moves as a whole.

    Attributes:
        sequence: The sequence.
        room: Bytes on the device at its final length.
        level: Current tier; None if nothing is stored.
        move: The copy in flight.
        pinned: Whether the sequence decodes, or is the next to.
        turn: Tokens produced in the current slice.
        used: Last iteration that used it.
        uses: Number of slices.
        staged: Whether it was prefetched and not used yet.
        entered_s, left_s: Start of the current slice and end of the last one, seconds.
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
        """Tokens that are stored or have to be computed."""
        return self.sequence.num_tokens

    @property
    def is_absent(self) -> bool:
        """Whether nothing of it is stored: not computed yet, or dropped."""
        return not self.sequence.num_computed_tokens

    @property
    def is_here(self) -> bool:
        """Whether it can decode: all of it is on the device, or has space to be computed there."""
        return self.level is Level.DEVICE and self.move is None


@dataclass(slots=True, eq=False)
class Move:
    """A copy to another tier, or an allocation on the device without a copy. The lowest urgency value goes first."""

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
    def is_spill(self) -> bool:
        return self.kv.level is not None and self.to > self.kv.level


@dataclass(slots=True)
class LinkStats:
    """Totals of a link."""

    bytes: int = 0
    busy_s: float = 0.0


@dataclass(slots=True)
class SequenceStore:
    """KV caches in three tiers. A copy takes space at its target when it starts, and frees its source when it ends.

    A link carries one copy at a time: the most urgent one that has space. A copy between device and flash occupies both
    links for the time of the slower one.
    """

    levels: Levels
    now_s: float = 0.0
    free: list[int] = field(default_factory=list)
    waiting: list[Move] = field(default_factory=list)
    running: list[Move] = field(default_factory=list)
    link_stats: dict[Level, LinkStats] = field(
        default_factory=lambda: {Level.HOST: LinkStats(), Level.FLASH: LinkStats()}
    )
    _number: int = 0

    def __post_init__(self) -> None:
        self.free = self.levels.capacities()

    def set_levels(self, levels: Levels) -> None:
        """Change the capacities. A tier above its new capacity accepts nothing until enough KV caches have left it."""
        before, self.levels = self.levels.capacities(), levels
        self.free = [free + now - old for free, now, old in zip(self.free, levels.capacities(), before, strict=True)]
        self._start()

    def size(self, kv: Kv, level: Level) -> int:
        """Size of a KV cache in a tier, bytes."""
        return kv.room if level is Level.DEVICE else self.levels.bytes_of(kv.tokens)

    def room(self, level: Level) -> int:
        """Unreserved bytes of a tier, free now or soon. Queued copies upwards do not count: they may wait for these."""
        leaving = sum(
            self.size(move.kv, level)
            for move in (*self.running, *self.waiting)
            if move.kv.level is level and (move.end_s is not None or move.is_spill)
        )
        return self.free[level] + leaving - sum(self.size(move.kv, level) for move in self.waiting if move.to is level)

    def move(self, kv: Kv, to: Level, urgency: int) -> None:
        """Queue a copy of a KV cache to a tier."""
        assert kv.move is None and kv.level is not to, f"request {kv.sequence.number}: it is on its way, or there"
        links = (
            ()
            if kv.level is None
            else tuple(Level(level) for level in range(min(kv.level, to) + 1, max(kv.level, to) + 1))
        )
        size = self.levels.bytes_of(kv.tokens) if links else 0
        self._number += 1
        kv.move = Move(urgency, self._number, kv, to, size, links)
        insort(self.waiting, kv.move)
        self._start()

    def raise_priority(self, move: Move, urgency: int) -> None:
        """Raise the priority of a queued copy."""
        if urgency < move.urgency and move.end_s is None:
            self.waiting.remove(move)
            move.urgency = urgency
            insort(self.waiting, move)

    def drop(self, kv: Kv) -> None:
        """Drop a KV cache that is not in flight."""
        assert kv.level is not None and kv.move is None
        self._release(kv)
        kv.level = None
        self._start()

    def cancel(self, kv: Kv) -> None:
        """Drop a KV cache in any state; a running copy finishes first."""
        if kv.move and kv.move.end_s is None:
            self.waiting.remove(kv.move)
            kv.move = None
        while kv.move:
            self.step()
        if kv.level is not None:
            self.drop(kv)

    def step(self) -> bool:
        """Advance to the end of the next copy; False if no copy is in flight."""
        if not self.running:
            return False
        self.run_until(min(move.end_s or 0.0 for move in self.running))
        return True

    def run_until(self, end_s: float) -> None:
        """Advance the time to `end_s`, seconds."""
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
                assert move.kv.move is move and move.end_s is None, f"request {move.kv.sequence.number}: copied twice"
                self.free[move.to] -= taken
                takes_s = max((self.levels.copy_s(link, move.size) for link in move.links), default=0.0)
                move.end_s = self.now_s + takes_s
                for link in move.links:
                    self.link_stats[link].bytes += move.size
                    self.link_stats[link].busy_s += takes_s
                if move.links:
                    self.running.append(move)
                else:
                    self._end(move)

    def _end(self, move: Move) -> None:
        kv = move.kv
        assert kv.move is move and move.end_s is not None and move.end_s <= self.now_s
        if kv.level is not None:
            self._release(kv)
        kv.level, kv.move = move.to, None

    def _release(self, kv: Kv) -> None:
        """Free the space of a KV cache in its tier."""
        assert kv.level is not None
        self.free[kv.level] += self.size(kv, kv.level)
        capacity = self.levels.capacities()[kv.level]
        assert self.free[kv.level] <= capacity, f"{kv.level.name}: {self.free[kv.level]} of {capacity} bytes are free"
