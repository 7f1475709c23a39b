"""Time slicing: more requests than fit on the device take turns; the KV cache of each moves between tiers as a whole.

This module has the shared mechanism; `policies/tierkv.py` has the policies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kv_cache.cost import ServingCost
from kv_cache.hardware import DEVICE, DIRECT, HOST
from kv_cache.scheduler import IterationResult, Placement, Policy, SchedulerOutput, SchedulerState
from kv_cache.transfer.sequences import Kv, Level, Levels, SequenceStore

NOW = 0  # urgency of a copy that the batch waits for
EMA = 0.1  # weight of the newest iteration
STAY = 20  # minimum decode time of a request before eviction, in multiples of its copy time
MAX_ON_FLASH = 8  # requests on flash, above which others rather stay on the device
LATE = 16  # iterations over which link utilization is averaged
TIERS = {Level.DEVICE: DEVICE, Level.HOST: HOST, Level.FLASH: DIRECT}


class DeadlockError(RuntimeError):
    """All sequences wait for memory, and no copy will free any."""

    def __init__(self) -> None:
        super().__init__(
            "deadlock: every request waits for memory and no transfer is in flight: increase the limits of the device "
            "or of host memory"
        )


@dataclass(slots=True)
class SliceCounters:
    """Counters of a run.

    Attributes:
        entries: Entries of sequences that had a KV cache already.
        hits: Entries that found it on the device.
        wasted_bytes: Prefetched bytes that were evicted unused.
        recomputed_tokens: Recomputed tokens.
        stalled_s: Seconds without computation.
        longest_wait_s: Longest wait for a slice, seconds.
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
    """Sequences are queued or decode together; copies make space for each other.

    Attributes:
        slice_tokens: Tokens per slice while others wait.
        staging: Fraction of the device that is reserved for prefetched data.
        free: Whether copies take no time: a bound.
        queue: Queued sequences.
        active: Sequences that decode.
        active_bytes: Bytes on the device that the active sequences need at their final length.
        iteration_s: Moving average of the time of an iteration, seconds.
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
        self.counts = SliceCounters()
        self.iteration, self.iteration_s, self.active_bytes, self.limit = 0, 0.0, 0, 0
        self._kvs: dict[int, Kv] = {}
        self._levels: Levels | None = None
        self._busy: deque[tuple[float, dict[Level, float]]] = deque(maxlen=LATE)

    # Decisions of a policy

    def victims(self, level: Level, cause: Kv) -> Iterable[Kv]:
        """KV caches that may leave a tier to make space for `cause`, in order of eviction."""
        raise NotImplementedError

    def enter_next(self) -> None:
        """Choose sequences that decode in the next iteration."""
        raise NotImplementedError

    def copy_ahead(self) -> None:
        """Start prefetches that overlap with the next iteration; by default none."""

    def recomputes(self, kv: Kv, down: Level) -> bool:
        """Whether a KV cache is dropped and recomputed instead of copied down to a tier."""
        return False

    # The iteration

    def schedule(self, s: SchedulerState) -> SchedulerOutput | None:
        if not self.limit:
            self._open(s)
        if self._levels is not self.store.levels:
            self._fit_limits()
        for sequence in s.sequences:
            if sequence.number not in self._kvs:
                room = self.store.levels.bytes_of(sequence.request.tokens + 1)
                self._kvs[sequence.number] = kv = Kv(sequence, room, left_s=sequence.arrived_s)
                self.queue.append(kv)
        self._decide()
        while not self.active:
            if self.store.running or s.coming:
                return None
            self._drop_last()
            self._decide()
        entering = [kv for kv in self.active if kv.is_absent]
        self.counts.recomputed_tokens += sum(kv.tokens for kv in entering if kv.uses > 1)
        stored = [kv for kv in self._kvs.values() if not kv.is_absent or kv in entering]
        return SchedulerOutput(
            num_scheduled_tokens={kv.sequence.number: kv.sequence.num_missing_tokens for kv in self.active},
            placement={kv.sequence.number: self._placement(kv, s.cost.layers) for kv in stored},
            preempted=frozenset(self._kvs) - {kv.sequence.number for kv in stored},
        )

    def _open(self, s: SchedulerState) -> None:
        assert s.store is not None, "time slices need tiers"
        self.store, self.cost, self.iteration_s = s.store, s.cost, s.cost.compute.linear_s()

    def _fit_limits(self) -> None:
        """Apply the store's capacities; if they fell, the latest requests are queued and full tiers evict."""
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
        """Choose the batch and start copies; if copies wait for each other's space, one KV cache is dropped."""
        while True:
            try:
                self.enter_next()
                self.copy_ahead()
                self.enter_next()  # new requests need no copy, and enter as soon as they fit
            except DeadlockError:
                self._drop_last()
            else:
                return

    def _drop_last(self) -> None:
        """Drop the KV cache of the last queued sequence; it is recomputed in its next slice."""
        waiting = [kv for kv in reversed(self.queue) if kv.move or kv.level is not None]
        if not waiting:
            raise DeadlockError
        self.store.cancel(waiting[0])
        waiting[0].sequence.num_computed_tokens = 0

    def _placement(self, kv: Kv, layers: int) -> Placement:
        level = kv.move.to if kv.move else kv.level
        return ((TIERS[level or Level.DEVICE],),) * layers

    # State changes of sequences

    def fits(self, kv: Kv) -> bool:
        """Whether a request fits on the device together with the active ones."""
        return self.active_bytes + kv.room <= self.limit

    def enter(self, kv: Kv) -> None:
        """Activate a request; its KV data must be on the device when the iteration starts."""
        self.queue.remove(kv)
        self.active.append(kv)
        self.active_bytes += kv.room
        self.counts.stays += 1
        if kv.uses:
            self.counts.entries += 1
            self.counts.hits += kv.is_here and not kv.is_absent
        self.counts.longest_wait_s = max(self.counts.longest_wait_s, self.store.now_s - kv.left_s)
        kv.pinned, kv.turn, kv.staged, kv.entered_s = True, 0, False, self.store.now_s
        kv.uses += 1

    def leave(self, kv: Kv) -> None:
        """Move a request to the end of the queue."""
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
        self.store.cancel(kv)

    def update(self, output: SchedulerOutput, result: IterationResult) -> None:
        self.iteration += 1
        self.iteration_s += EMA * (result.took_s - self.iteration_s)
        for kv in self.active:
            kv.turn += 1
        link_stats = self.store.link_stats.items()
        self._busy.append((self.store.now_s, {link: stats.busy_s for link, stats in link_stats}))

    def link_utilization(self, link: Level) -> float:
        """Fraction of recent time in which a link was busy."""
        if len(self._busy) < 2:
            return 0.0
        (began_s, before), (end_s, after) = self._busy[0], self._busy[-1]
        return (after[link] - before[link]) / (end_s - began_s)

    def is_over(self, kv: Kv) -> bool:
        """Whether a request has used up its slice."""
        return kv.turn >= self.slice_tokens

    def request_copy(self, kv: Kv, to: Level, urgency: int) -> bool:
        """Request the next copy towards a tier; False if the target has no space and none can be made."""
        if kv.move:
            self.store.raise_priority(kv.move, urgency)
            return True
        if kv.level is not None and kv.level <= to:
            return True
        step = Level.HOST if kv.level is Level.FLASH else to
        if not self.make_room(step, kv, urgency, kv):
            if step is to or urgency > NOW or not self.make_room(to, kv, urgency, kv):
                return False
            step = to
        kv.staged = urgency > NOW and not kv.is_absent
        self.store.move(kv, step, urgency)
        return True

    def make_room(self, level: Level, kv: Kv, urgency: int, cause: Kv) -> bool:
        """Evict KV caches from a tier until that of `kv` fits, for the sake of `cause`; False if it cannot fit."""
        lacking = self.store.size(kv, level) - self.store.room(level)
        if lacking <= 0:
            return True
        chosen = []
        for victim in self.victims(level, cause):
            if victim not in (kv, cause):
                chosen.append(victim)
                lacking -= self.store.size(victim, level)
            if lacking <= 0:
                return all(self._displace(victim, urgency, cause) for victim in chosen)
        return False

    def _displace(self, kv: Kv, urgency: int, cause: Kv) -> bool:
        """Move a KV cache down one tier, or drop it; False if it has to wait for space there."""
        down = Level.HOST if kv.level is Level.DEVICE else Level.FLASH
        if down is Level.HOST and not self._is_dropped(kv, down):
            if not self.make_room(down, kv, urgency, cause):
                if not self._can_bypass_host(kv, urgency):
                    return False
                down = Level.FLASH
            elif kv.pinned and self.store.free[down] < self.store.size(kv, down):
                return False  # it decodes until there is space
        if self._is_dropped(kv, down):
            self.drop_for_recompute(kv)
            return True
        if self.store.room(down) < self.store.size(kv, down):
            raise ValueError(
                f"flash is full: {self.store.levels.flash_bytes / 1e9:,.0f} GB do not hold the queued KV caches"
            )
        if kv.pinned:
            self.leave(kv)
        if kv.staged:
            self.counts.wasted_bytes += self.store.levels.bytes_of(kv.tokens)
            kv.staged = False
        self.store.move(kv, down, urgency)
        return True

    def _is_dropped(self, kv: Kv, down: Level) -> bool:
        return kv.is_absent or self.recomputes(kv, down)

    def _can_bypass_host(self, kv: Kv, urgency: int) -> bool:
        """Whether a KV cache may be copied from the device directly to flash, which occupies both links.

        Allowed if the batch waits for it. Otherwise only if no copy is in flight or queued, for a request that has
        stayed long enough.
        """
        if urgency == NOW:
            return True
        idle = not (self.store.running or self.store.waiting)
        return idle and (not kv.pinned or (self.min_stay_reached(kv, Level.FLASH) and self.may_fill_flash()))

    def may_fill_flash(self) -> bool:
        """Whether flash may take another KV cache: it has to be read again over the slowest link."""
        return sum(Level.FLASH in (kv.level, kv.move.to if kv.move else None) for kv in self.queue) < MAX_ON_FLASH

    def min_stay_reached(self, kv: Kv, by: Level) -> bool:
        """Whether a request has decoded so long that its copies, or an iteration without its memory, cost little."""
        copies_s = 2 * self.store.levels.copy_s(by, self.store.levels.bytes_of(kv.tokens))
        return self.store.now_s - kv.entered_s >= STAY * max(copies_s, self.iteration_s)

    def recompute_is_faster(self, kv: Kv, by: Level) -> bool:
        """Whether recomputation, which delays the whole batch, costs less than copying over a link."""
        computed_s = self.cost.compute.prefill_s(kv.tokens) * max(1, len(self.active))
        return computed_s < self.store.levels.copy_s(by, self.store.levels.bytes_of(kv.tokens))

    def drop_for_recompute(self, kv: Kv) -> None:
        """Drop a KV cache; it is recomputed when the request is active again."""
        if kv.pinned:
            self.leave(kv)
        self.store.drop(kv)
        kv.sequence.num_computed_tokens = 0
