"""An engine's objects on one of several conventional drives: read, written and evicted, request by request."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from csd_spec.arrays import I64
from ftl.flash.placement import Writer
from vcsd_eval.lifetime.drive import DayReplay, DriveTraffic
from vcsd_eval.lifetime.patterns import FILL, WritePattern
from vcsd_eval.lifetime.workload import Key, Visit

_SPREAD = 0x9E3779B1  # an odd number that mixes keys over drives


class BlockCache:
    """Blocks of prompts on one drive: slots for objects, and eviction when all are taken.

    A slot that was freed is used again after all that were freed before it, as an allocator of extents does that
    spreads writes.
    """

    def __init__(self, slots: int) -> None:
        self.limit, self._free = int(slots * FILL), deque(range(slots))
        self.held: OrderedDict[Key, list[int]] = OrderedDict()
        self._used = 0

    def put(self, key: Key, count: int) -> tuple[list[int], list[int]]:
        """Slots of a new block, and those of blocks that had to go for it; raises ValueError without room for it."""
        gone = list[int]()
        while self._used + count > self.limit:
            if not self.held:
                raise ValueError(f"a block of {count} objects: the drive has {self.limit}: take a smaller --scale")
            gone += self._evict()
        slots = [self._free.popleft() for _ in range(count)]
        self.held[key], self._used = slots, self._used + count
        return slots, gone

    def _evict(self) -> list[int]:
        _, slots = self.held.popitem(last=False)
        self._free.extend(slots)
        self._used -= len(slots)
        return slots


class EngineReplay(DayReplay):
    """One engine's pattern on one drive, while the caches of the others are only followed."""

    def __init__(self, pattern: WritePattern, load: DriveTraffic, handles: int = 0, discard: bool = False) -> None:
        """handles: Placement handles that writes are spread over by turn of the conversation; 0: one for all.
        discard: Deletions reach the drive at once.
        """
        page, shape = load.spec.geometry.page_bytes, load.shape
        super().__init__(load)
        self.pattern, self.discard = pattern, discard
        layers = shape.layers if pattern.per_layer else 1
        object_bytes = pattern.object_tokens * shape.kv_bytes_per_token // layers
        self.object_pages, self.per_object = -(-object_bytes // page), layers
        self.slots = load.logical_pages // self.object_pages
        self.caches = [BlockCache(self.slots) for _ in range(load.drives)]
        self.ftl.blocks.resize(self.slots * self.object_pages)
        self.writers = [Writer(load.spec.geometry.channels) for _ in range(handles)]

    def visit(self, visit: Visit, number: int) -> None:
        """Read what a request reuses, and store the rest of its prompt."""
        now_ns, whole = self.load.ns(visit.arrival_s), self.pattern.object_tokens
        blocks = [(key, count) for key, count in self._blocks(visit) if count]
        hits = 0
        while hits < len(blocks) and blocks[hits][0] in self._cache(blocks[hits][0]).held:
            hits += 1
        reused = min(sum(count * whole for _, count in blocks[:hits]), visit.input_tokens - 1)
        self.meter.tally.add(visit.input_tokens, visit.output_tokens, reused)
        here = [self.caches[0].held[key] for key, _ in blocks[:hits] if self._cache(key) is self.caches[0]]
        if here:
            lpns = self._pages(list(chain.from_iterable(here)))
            self.meter.read(self.ftl.blocks.map[lpns], now_ns, number)
        for key, count in reversed(blocks):  # the last of a prompt is the first to go
            cache = self._cache(key)
            if key not in cache.held:
                self._store(cache, cache.put(key, count * self.per_object), visit.turn, now_ns)
            cache.held.move_to_end(key)

    def _blocks(self, visit: Visit) -> list[tuple[Key, int]]:
        """Blocks of a prompt, and the whole objects in each."""
        size, tokens = self.load.day.block_tokens, self.pattern.object_tokens
        lengths = [min(size, visit.input_tokens - at * size) for at in range(len(visit.keys))]
        return [(key, length // tokens) for key, length in zip(visit.keys, lengths, strict=True)]

    def _cache(self, key: Key) -> BlockCache:
        return self.caches[(key[0] * 31 + key[1]) * _SPREAD % 2**32 * len(self.caches) >> 32]

    def _store(self, cache: BlockCache, slots: tuple[list[int], list[int]], turn: int, now_ns: int) -> None:
        """Write a block's objects, on the drive that is simulated."""
        if cache is not self.caches[0]:
            return
        new, gone = slots
        if self.discard:
            for run in _runs(sorted(set(gone) - set(new))):
                self.ftl.blocks.discard(run.start * self.object_pages, len(run) * self.object_pages)
        writer = self.writers[min(turn, len(self.writers) - 1)] if self.writers else None
        self.ftl.blocks.write(self._pages(new), None, now_ns, writer)

    def _pages(self, slots: Sequence[int]) -> I64:
        """Logical pages of slots."""
        first = np.asarray(slots, np.int64)[:, None] * self.object_pages
        return (first + np.arange(self.object_pages)).ravel()


def _runs(slots: Sequence[int]) -> Iterator[range]:
    """Ascending slots as runs of neighbours."""
    first = 0
    for at in range(1, len(slots) + 1):
        if at == len(slots) or slots[at] != slots[at - 1] + 1:
            yield range(slots[first], slots[at - 1] + 1)
            first = at
