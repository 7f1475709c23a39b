"""TierKV, the reactive policies it is compared with, ours, and a bound: eviction order, admission and prefetching."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kv_cache.policies.time_slices import NOW, DeadlockError, TimeSlices
from kv_cache.transfer.sequences import Kv, Level

WINDOW, FLASH_WINDOW = 4, 8  # iterations of TierKV's lookahead
HIGH_WATER = 0.8  # link utilization above which only copies for the next iteration start
STAGING = 1 / 16  # fraction of the device reserved for prefetched data
READ_AHEAD = 8  # requests at the head of the queue that may be prefetched from flash
MAX_PREFETCHES = 3  # maximum number of prefetches that wait for a link


class Rotating(TimeSlices):
    """Round robin: sequences leave after their slice, the next ones enter, and the batch waits for their KV caches.

    Tiers evict the least recently used first. Nothing is dropped.
    """

    def victims(self, level: Level, cause: Kv) -> Iterable[Kv]:
        return sorted(self.movable(level), key=lambda kv: kv.used)

    def movable(self, level: Level) -> Iterator[Kv]:
        """KV caches in a tier that are neither pinned nor in flight."""
        return (kv for kv in self.queue if kv.level is level and kv.move is None and not kv.pinned)

    def enter_next(self) -> None:
        if self.queue:
            for kv in [kv for kv in self.active if self.is_over(kv)]:
                self.leave(kv)
        entering = []
        while self.queue and self.fits(self.queue[0]):
            entering.append(self.queue[0])
            self.enter(entering[-1])
        began_s = self.store.now_s
        while late := [kv for kv in entering if not kv.is_here]:
            for kv in late:
                self.request_copy(kv, Level.DEVICE, NOW)
            if not all(kv.is_here for kv in late) and not self.store.step():
                raise DeadlockError
        self.counts.stalled_s += self.store.now_s - began_s


class Static(Rotating):
    """Three tiers, with copies on demand."""


class Lru(Rotating):
    """Two tiers: a KV cache that does not fit in host memory is recomputed."""

    def recomputes(self, kv: Kv, down: Level) -> bool:
        return down is Level.FLASH


class Lfu(Lru):
    """Like `Lru`, but the least frequently used is evicted first."""

    def victims(self, level: Level, cause: Kv) -> Iterable[Kv]:
        return sorted(self.movable(level), key=lambda kv: (kv.uses, kv.used))


class Oracle(Rotating):
    """Copies take no time: an upper bound for time-slicing policies."""

    free = True


class TierKv(Rotating):
    """Prefetches a KV cache if it can arrive in time on an idle link: two hops, with a window each (Eq. 3)."""

    staging = STAGING

    def copy_ahead(self) -> None:
        levels = self.store.levels
        for ahead, kv in self.due(FLASH_WINDOW):
            if kv.move or kv.level in (None, Level.DEVICE):
                continue
            link = Level.FLASH if kv.level is Level.FLASH else Level.HOST
            if link is Level.HOST and ahead > WINDOW:
                continue
            in_time = levels.copy_s(link, levels.bytes_of(kv.tokens)) <= ahead * self.iteration_s
            if in_time and (ahead == 1 or self.link_utilization(link) <= HIGH_WATER):
                self.request_copy(kv, Level.HOST if link is Level.FLASH else Level.DEVICE, ahead)

    def due(self, window: int) -> Iterator[tuple[int, Kv]]:
        """Sequences that enter within a window and the number of iterations until then, by slices and lengths."""
        room = self.limit - self.active_bytes
        waiting = iter(list(self.queue))
        kv = next(waiting, None)
        for ahead in range(1, window + 1):
            for active in self.active:
                request, output_tokens = active.sequence.request, active.sequence.num_output_tokens
                left = min(self.slice_tokens - active.turn, request.output_tokens - output_tokens)
                room += active.room if left == ahead else 0
            while kv and kv.room <= room:
                room -= kv.room
                yield ahead, kv
                kv = next(waiting, None)


class Mended(TimeSlices):
    """Ours: a sequence decodes as soon as it is on the device, and stays long enough to be worth its copies.

    Tiers evict from the end of the queue, and never a sequence that is due before the one that needs the space. The
    head of the queue is prefetched while space allows. A KV cache is recomputed if that is faster than copying it.
    """

    def victims(self, level: Level, cause: Kv) -> Iterable[Kv]:
        if level is Level.DEVICE:
            if not any(Level.HOST in move.links for move in self.store.waiting):
                yield from [kv for kv in self.active if self.is_over(kv) and self.min_stay_reached(kv, Level.HOST)]
        elif self.may_fill_flash():
            behind = self.queue[self.queue.index(cause) + 1 :]
            yield from (kv for kv in reversed(behind) if kv.level is level and not kv.move)

    def enter_next(self) -> None:
        for kv in list(self.queue):
            if kv.is_here:
                self.enter(kv)

    def recomputes(self, kv: Kv, down: Level) -> bool:
        return self.recompute_is_faster(kv, down)

    def copy_ahead(self) -> None:
        full = False
        for place, kv in enumerate(list(self.queue), 1):
            if len(self.store.waiting) >= MAX_PREFETCHES:
                return
            if kv.move or kv.level is Level.DEVICE:
                continue
            if kv.level is not None and self.recompute_is_faster(kv, kv.level):
                self.drop_for_recompute(kv)
            if kv.level is not Level.FLASH:
                full = full or not self.request_copy(kv, Level.DEVICE, place)
            elif place <= READ_AHEAD:
                self.request_copy(kv, Level.HOST, place)
