"""Time slices: more requests than the device holds take turns, and the KV cache of each moves between tiers as a whole.

The mechanics that all such policies share; `policies/tierkv.py` has the policies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kv_cache.cost import ServingCost
from kv_cache.hardware import DEVICE, DIRECT, HOST
from kv_cache.scheduler import IterationResult, Placement, Policy, SchedulerOutput, SchedulerState
from kv_cache.transfer.sequences import Kv, Level, Levels, SequenceStore

NOW = 0  # the urgency of what is waited for
EMA = 0.1  # weight of the newest iteration
STAY = 20  # times as long as its copies take that a request decodes before it makes room
ON_FLASH = 8  # requests, beyond which others rather stay on the device
LATE = 16  # iterations over which the use of links is watched
TIERS = {Level.DEVICE: DEVICE, Level.HOST: HOST, Level.FLASH: DIRECT}


class NothingMoves(RuntimeError):
    """All sequences wait for room that none of them leaves."""

    def __init__(self) -> None:
        super().__init__("nothing moves: the KV caches of all requests wait for each other's room")


@dataclass(slots=True)
class Counts:
    """What has happened.

    Attributes:
        entries: Sequences with a KV cache that came to the device.
        hits: Those that found it there.
        wasted_bytes: Bytes that were copied towards the device and not used.
        recomputed_tokens: Tokens that were computed again.
        stalled_s: Seconds in which nothing was computed.
        longest_wait_s: The longest wait for a slice.
        stays: Slices.
    """

    entries: int = 0
    hits: int = 0
    wasted_bytes: int = 0
    recomputed_tokens: int = 0
    stalled_s: float = 0.0
    longest_wait_s: float = 0.0
    stays: int = 0


class TimeSlices(Policy):
    """Sequences wait in a queue or decode together; copies make room for each other.

    Attributes:
        slice_tokens: Tokens that a sequence makes while others wait.
        staging: Share of the device that is kept for what comes ahead.
        free: Whether copies take no time: a bound.
        queue: Sequences that wait.
        active: Sequences that decode.
        active_bytes: Bytes on the device that those need in the end.
        iteration_s: Moving average of iterations' seconds.
    """

    tiers: tuple[str, ...] = (DEVICE, HOST, DIRECT)
    admits = True
    staging = 0.0
    free = False
    store: SequenceStore
    cost: ServingCost

    def __init__(self, slice_tokens: int = 32) -> None:
        self.slice_tokens = slice_tokens
        self.queue: list[Kv] = []
        self.active: list[Kv] = []
        self.counts = Counts()
        self.iteration, self.iteration_s, self.active_bytes, self.limit = 0, 0.0, 0, 0
        self._kvs: dict[int, Kv] = {}
        self._levels: Levels | None = None
        self._busy: deque[tuple[float, dict[Level, float]]] = deque(maxlen=LATE)

    # What a policy decides

    def victims(self, level: Level, cause: Kv) -> Iterable[Kv]:
        """What may leave a tier for the sake of a sequence, the first to go first."""
        raise NotImplementedError

    def enter_next(self) -> None:
        """Let sequences decode in the next iteration."""
        raise NotImplementedError

    def copy_ahead(self) -> None:
        """Begin copies that go on beside the next iteration; by default none."""

    def recomputes(self, kv: Kv, down: Level) -> bool:
        """Whether a KV cache is given up, and computed again, rather than copied down to a tier."""
        return False

    # The iteration

    def schedule(self, s: SchedulerState) -> SchedulerOutput | None:
        if not self.limit:
            self._open(s)
        if self._levels is not self.store.levels:
            self._fit_limits()
        for each in s.sequences:
            if each.number not in self._kvs:
                room = self.store.levels.bytes_of(each.request.tokens + 1)
                self._kvs[each.number] = kv = Kv(each, room, left_s=each.arrived_s)
                self.queue.append(kv)
        self._decide()
        while not self.active:
            if self.store.running or s.coming:
                return None
            self._give_up_last()
            self._decide()
        entering = [kv for kv in self.active if kv.absent]
        self.counts.recomputed_tokens += sum(kv.tokens for kv in entering if kv.uses > 1)
        stored = [kv for kv in self._kvs.values() if not kv.absent or kv in entering]
        return SchedulerOutput(
            num_scheduled_tokens={kv.sequence.number: kv.sequence.num_missing_tokens for kv in self.active},
            placement={kv.sequence.number: self._placement(kv, s.cost.layers) for kv in stored},
            preempted=frozenset(self._kvs) - {kv.sequence.number for kv in stored},
        )

    def _open(self, s: SchedulerState) -> None:
        assert s.store is not None, "time slices need tiers"
        self.store, self.cost, self.iteration_s = s.store, s.cost, s.cost.compute.linear_s()

    def _fit_limits(self) -> None:
        """Take the store's capacities; after a fall, requests that came last wait and KV caches leave full tiers."""
        self._levels = levels = self.store.levels
        longest = levels.bytes_of(levels.longest_tokens)
        staged = max(int(self.staging * levels.device_bytes), longest) if self.staging else 0
        self.limit = max(levels.device_bytes - staged, longest)
        while self.active_bytes > self.limit:
            self.leave(self.active[-1])
        for level in (Level.DEVICE, Level.HOST):
            for kv in reversed(self.queue):
                if self.store.room(level) >= 0:
                    break
                if kv.level is level and kv.move is None:
                    self._displace(kv, NOW, kv)

    def _decide(self) -> None:
        """Who decodes next, and what is copied; if copies wait for each other's room, one KV cache is given up."""
        while True:
            try:
                self.enter_next()
                self.copy_ahead()
                self.enter_next()  # new ones have nothing to copy, and are there as soon as there is room
            except NothingMoves:
                self._give_up_last()
            else:
                return

    def _give_up_last(self) -> None:
        """Give up the KV cache of the last sequence that waits; it is computed again in its turn."""
        waiting = [kv for kv in reversed(self.queue) if kv.move or kv.level is not None]
        if not waiting:
            raise NothingMoves
        self.store.withdraw(waiting[0])
        waiting[0].sequence.num_computed_tokens = 0

    def _placement(self, kv: Kv, layers: int) -> Placement:
        level = kv.move.to if kv.move else kv.level
        return ((TIERS[level or Level.DEVICE],),) * layers

    # What happens to sequences

    def fits(self, kv: Kv) -> bool:
        """Whether a request may decode with the others."""
        return self.active_bytes + kv.room <= self.limit

    def enter(self, kv: Kv) -> None:
        """A request decodes from now on; its K and V must be on the device when the iteration begins."""
        self.queue.remove(kv)
        self.active.append(kv)
        self.active_bytes += kv.room
        self.counts.stays += 1
        if kv.uses:
            self.counts.entries += 1
            self.counts.hits += kv.is_here and not kv.absent
        self.counts.longest_wait_s = max(self.counts.longest_wait_s, self.store.now_s - kv.left_s)
        kv.pinned, kv.turn, kv.staged, kv.entered_s = True, 0, False, self.store.now_s
        kv.uses += 1

    def leave(self, kv: Kv) -> None:
        """A request waits again, behind all others."""
        self.active.remove(kv)
        self.active_bytes -= kv.room
        kv.pinned, kv.left_s, kv.used = False, self.store.now_s, self.iteration
        self.queue.append(kv)

    def forget(self, number: int) -> None:
        if (kv := self._kvs.pop(number, None)) is None:
            return
        if kv in self.active:
            self.active.remove(kv)
            self.active_bytes -= kv.room
        else:
            self.queue.remove(kv)
        self.store.withdraw(kv)

    def update(self, output: SchedulerOutput, result: IterationResult) -> None:
        self.iteration += 1
        self.iteration_s += EMA * (result.took_s - self.iteration_s)
        for kv in self.active:
            kv.turn += 1
        carried = self.store.carried.items()
        self._busy.append((self.store.now_s, {link: each.busy_s for link, each in carried}))

    def use(self, link: Level) -> float:
        """The share of its time that a link had work lately."""
        if len(self._busy) < 2:
            return 0.0
        (began_s, before), (end_s, after) = self._busy[0], self._busy[-1]
        return (after[link] - before[link]) / (end_s - began_s)

    def is_over(self, kv: Kv) -> bool:
        """Whether a request has had its slice."""
        return kv.turn >= self.slice_tokens

    def bring(self, kv: Kv, to: Level, urgency: int) -> bool:
        """Ask for the next copy on the way up; False where there is no room for it and none can be made."""
        if kv.move:
            self.store.hurry(kv.move, urgency)
            return True
        if kv.level is not None and kv.level <= to:
            return True
        step = Level.HOST if kv.level is Level.FLASH else to
        if not self.make_room(step, kv, urgency, kv):
            if step is to or urgency > NOW or not self.make_room(to, kv, urgency, kv):
                return False
            step = to
        kv.staged = urgency > NOW and not kv.absent
        self.store.move(kv, step, urgency)
        return True

    def make_room(self, level: Level, kv: Kv, urgency: int, cause: Kv) -> bool:
        """Have what may go from a level go, until there is room for K and V. cause: for whose sake."""
        lacking = self.store.size(kv, level) - self.store.room(level)
        if lacking <= 0:
            return True
        chosen = []
        for victim in self.victims(level, cause):
            if victim not in (kv, cause):
                chosen.append(victim)
                lacking -= self.store.size(victim, level)
            if lacking <= 0:
                return all(self._displace(each, urgency, cause) for each in chosen)
        return False

    def _displace(self, kv: Kv, urgency: int, cause: Kv) -> bool:
        """Have K and V go down a level, or be given up; False if they have to wait for room there."""
        down = Level.HOST if kv.level is Level.DEVICE else Level.FLASH
        if down is Level.HOST and not self._is_given_up(kv, down):
            if not self.make_room(down, kv, urgency, cause):
                if not self._may_pass_host(kv, urgency):
                    return False
                down = Level.FLASH
            elif kv.pinned and self.store.free[down] < self.store.size(kv, down):
                return False  # it decodes until there is room
        if self._is_given_up(kv, down):
            self.give_up(kv)
            return True
        if self.store.room(down) < self.store.size(kv, down):
            raise ValueError(f"flash is full: {self.store.levels.flash_bytes / 1e9:,.0f} GB do not hold what waits")
        if kv.pinned:
            self.leave(kv)
        if kv.staged:
            self.counts.wasted_bytes += self.store.levels.bytes_of(kv.tokens)
            kv.staged = False
        self.store.move(kv, down, urgency)
        return True

    def _is_given_up(self, kv: Kv, down: Level) -> bool:
        return kv.absent or self.recomputes(kv, down)

    def _may_pass_host(self, kv: Kv, urgency: int) -> bool:
        """Whether K and V may go from the device to flash at once, which occupies both links: what is waited for may,
        and else where nothing is under way that would make room, for a request that has stayed as long as that is
        worth."""
        if urgency == NOW:
            return True
        idle = not (self.store.running or self.store.waiting)
        return idle and (not kv.pinned or (self.has_stayed(kv, Level.FLASH) and self.may_fill_flash()))

    def may_fill_flash(self) -> bool:
        """Whether more may go to flash: what is there has to be read again, over the slowest link, in the end."""
        return sum(Level.FLASH in (kv.level, kv.move.to if kv.move else None) for kv in self.queue) < ON_FLASH

    def has_stayed(self, kv: Kv, by: Level) -> bool:
        """Whether a request has decoded so long that copies out and in again, or the iteration that the room is not
        used for, are little."""
        copies_s = 2 * self.store.levels.copy_s(by, self.store.levels.bytes_of(kv.tokens))
        return self.store.now_s - kv.entered_s >= STAY * max(copies_s, self.iteration_s)

    def computes_sooner(self, kv: Kv, by: Level) -> bool:
        """Whether all who decode lose less by computing K and V again than one does by copies over a link."""
        computed_s = self.cost.compute.prefill_s(kv.tokens) * max(1, len(self.active))
        return computed_s < self.store.levels.copy_s(by, self.store.levels.bytes_of(kv.tokens))

    def give_up(self, kv: Kv) -> None:
        """Have K and V computed again when the request comes back."""
        if kv.pinned:
            self.leave(kv)
        self.store.drop(kv)
        kv.sequence.num_computed_tokens = 0
