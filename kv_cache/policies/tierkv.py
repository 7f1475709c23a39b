"""TierKV, the reactive policies that it is compared with, ours, and a bound: who goes first, who enters, what is copied
ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kv_cache.policies.time_slices import NOW, NothingMoves, TimeSlices
from kv_cache.transfer.sequences import Kv, Level

WINDOW, FLASH_WINDOW = 4, 8  # iterations that TierKV looks ahead
HIGH_WATER = 0.8  # of a link's time, beyond which only the most urgent copies are begun
STAGING = 1 / 16  # of the device
READ_AHEAD = 8  # requests at the head of the queue that may come from flash
UNDER_WAY = 3  # copies ahead that wait for a link


class Rotating(TimeSlices):
    """Sequences that have had their slice leave, the next ones enter, and the batch waits for their KV cache.

    The least recently used leave a tier first, and nothing is given up.
    """

    def victims(self, level: Level, cause: Kv) -> Iterable[Kv]:
        return sorted(self.movable(level), key=lambda kv: kv.used)

    def movable(self, level: Level) -> Iterator[Kv]:
        """KV caches in a tier that nothing needs now."""
        return (kv for kv in self.queue if kv.level is level and kv.move is None and not kv.pinned)

    def enter_next(self) -> None:
        if self.queue:
            for kv in [each for each in self.active if self.is_over(each)]:
                self.leave(kv)
        entering = []
        while self.queue and self.fits(self.queue[0]):
            entering.append(self.queue[0])
            self.enter(entering[-1])
        began_s = self.store.now_s
        while late := [kv for kv in entering if not kv.is_here]:
            for kv in late:
                self.bring(kv, Level.DEVICE, NOW)
            if not all(kv.is_here for kv in late) and not self.store.step():
                raise NothingMoves
        self.counts.stalled_s += self.store.now_s - began_s


class Static(Rotating):
    """Three tiers, and copies when they are needed."""


class Lru(Rotating):
    """Two tiers: what does not fit host memory is computed again."""

    def recomputes(self, kv: Kv, down: Level) -> bool:
        return down is Level.FLASH


class Lfu(Lru):
    """The same, the least often used first."""

    def victims(self, level: Level, cause: Kv) -> Iterable[Kv]:
        return sorted(self.movable(level), key=lambda kv: (kv.uses, kv.used))


class Oracle(Rotating):
    """Copies take no time: no policy that takes turns is faster."""

    free = True


class TierKv(Rotating):
    """A KV cache that enters soon is copied if it alone can arrive in time: two hops, with a window each (Eq. 3)."""

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
            if in_time and (ahead == 1 or self.use(link) <= HIGH_WATER):
                self.bring(kv, Level.HOST if link is Level.FLASH else Level.DEVICE, ahead)

    def due(self, window: int) -> Iterator[tuple[int, Kv]]:
        """Sequences that enter within a window, and after how many iterations, by slices and requests' ends."""
        room = self.limit - self.active_bytes
        waiting = iter(list(self.queue))
        kv = next(waiting, None)
        for ahead in range(1, window + 1):
            for each in self.active:
                request, made = each.sequence.request, each.sequence.num_output_tokens
                left = min(self.slice_tokens - each.turn, request.output_tokens - made)
                room += each.room if left == ahead else 0
            while kv and kv.room <= room:
                room -= kv.room
                yield ahead, kv
                kv = next(waiting, None)


class Mended(TimeSlices):
    """Ours: a sequence decodes as soon as it lies on the device, and stays as long as its copies are worth.

    The last of the queue leave a tier first, and nothing that is due before the sequence that needs the room. The next
    of the queue are copied as room allows, and a KV cache is computed again where that takes less time.
    """

    def victims(self, level: Level, cause: Kv) -> Iterable[Kv]:
        if level is Level.DEVICE:
            if not any(Level.HOST in move.links for move in self.store.waiting):
                yield from [kv for kv in self.active if self.is_over(kv) and self.has_stayed(kv, Level.HOST)]
        elif self.may_fill_flash():
            behind = self.queue[self.queue.index(cause) + 1 :]
            yield from (kv for kv in reversed(behind) if kv.level is level and not kv.move)

    def enter_next(self) -> None:
        for kv in list(self.queue):
            if kv.is_here:
                self.enter(kv)

    def recomputes(self, kv: Kv, down: Level) -> bool:
        return self.computes_sooner(kv, down)

    def copy_ahead(self) -> None:
        full = False
        for place, kv in enumerate(list(self.queue), 1):
            if len(self.store.waiting) >= UNDER_WAY:
                return
            if kv.move or kv.level is Level.DEVICE:
                continue
            if kv.level is not None and self.computes_sooner(kv, kv.level):
                self.give_up(kv)
            if kv.level is not Level.FLASH:
                full = full or not self.bring(kv, Level.DEVICE, place)
            elif place <= READ_AHEAD:
                self.bring(kv, Level.HOST, place)
