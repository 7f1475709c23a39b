"""Pairs split over both tiers: K of as many layers as fit behind the page cache, V past it, at the same time.

Dual-Blade's groups use one tier while the other rests. Here a layer's K and V come over different links, and arrive
together when both tiers are as fast as they are large.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_cache.block_table import BlockKey
from kv_cache.carry_out import GOLDEN
from kv_cache.hardware import DEVICE, DIRECT, PAGE_CACHE
from kv_cache.iteration import Iteration
from kv_cache.policies._stream import stream

LARGE = 1 << 30  # bytes of a copy whose start and first piece count little
PATIENCE = 4, 32  # iterations without a miss before feedback caches more: at first, and at most after failures


def split(it: Iteration, ahead: int = 1, share: float | None = None, feedback: bool = False) -> None:
    """Of every layer the same share is cached: half of it in K where that fits, else K of some of the layers.

    Args:
        it: The iteration.
        ahead: Layers that come before they are attended.
        share: Of K and V that is cached, instead of what the cache keeps and `_balanced` allows.
        feedback: Whether less is cached when most of that had to come from the disk again, and more after a while
            without misses: for a cache whose limit is not known.
    """
    most = _planned(it) if share is None else int(len(it.parts) * share * len(it.layers))
    count = _fed_back(it, most) if feedback else most
    cached = set([(layer, part) for part in it.parts for layer in _spread(it.layers)][:count])

    def home(block: BlockKey) -> str:
        return PAGE_CACHE if (block.layer, block.part) in cached else DIRECT

    stream(it, home, ahead)


def _planned(it: Iteration) -> int:
    """Parts of layers that are cached, planned again when the page cache's limit or the stored bytes change.

    Requests that pause while a prompt is prefilled keep their share of the cache.
    """
    layer_bytes = max(it.layer_bytes(), it.layer_bytes(it.final_tokens))
    if it.prefill:
        layer_bytes = max(layer_bytes, it.memory.get("layer_bytes", 0))
    known = it.capacity(PAGE_CACHE), layer_bytes
    if known != it.memory.get("known"):
        it.memory["known"], it.memory["layer_bytes"] = known, layer_bytes
        kept = int(min(len(it.layers), it.capacity(PAGE_CACHE) // layer_bytes))
        it.memory["most"] = min(len(it.parts) * kept, _balanced(it))
    most: int = it.memory["most"]
    return most


def _balanced(it: Iteration) -> int:
    """Parts of layers that come from the page cache in the time in which the others come past it."""
    parts = len(it.parts) * len(it.layers)
    cached_s, direct_s = (it.transfer_s(tier, DEVICE, LARGE) for tier in (PAGE_CACHE, DIRECT))
    return round(parts * direct_s / (cached_s + direct_s))


@dataclass(slots=True)
class _Feedback:
    """How many parts of layers are cached, by how many of an iteration's reads the cache had.

    Under half: one less, then two, then four. All of them, for as many iterations as the patience: one more, then two,
    then four. A change that was too much is undone, and doubles the patience.
    """

    most: int
    count: int
    change: int = 0
    calm: int = 0  # iterations without a miss
    patience: int = PATIENCE[0]
    settling: int = 0  # iterations until the last change shows

    def update(self, read: int, hit: int) -> None:
        """Bytes that the last iteration read, and of these what the cache had."""
        grew, self.calm = self.change > 0, self.calm + 1 if hit == read else 0
        if self.settling:
            self.settling -= 1
        elif 2 * hit < read:
            self.patience = min(2 * self.patience, PATIENCE[1]) if grew else self.patience
            self.change = -self.change if grew else min(-1, 2 * self.change)
            self._apply(1 + grew)
        elif hit == read and self.count < self.most and (grew or self.calm > self.patience):
            self.patience = PATIENCE[0] if grew else self.patience
            self.change = max(1, 2 * self.change)
            self._apply(1)
        else:
            self.change = 0

    def _apply(self, settling: int) -> None:
        self.count, self.calm, self.settling = max(0, min(self.most, self.count + self.change)), 0, settling


def _fed_back(it: Iteration, most: int) -> int:
    """Parts of layers that are cached, of at most `most`: all of them at first, and when that changes."""
    state: _Feedback | None = it.memory.get("feedback")
    if state is None or state.most != most:
        state = it.memory["feedback"] = _Feedback(most, most)
    found = it.page_cache_hits(PAGE_CACHE) or (0, 0)
    read, hit = (now - before for now, before in zip(found, it.memory.get("found", (0, 0)), strict=True))
    it.memory["found"] = found
    if read:
        state.update(read, hit)
    return state.count


def _spread(layers: range) -> list[int]:
    """Layers in an order of which every beginning is spread over all of them: by the golden ratio."""
    return sorted(layers, key=lambda layer: layer * GOLDEN % 1)
