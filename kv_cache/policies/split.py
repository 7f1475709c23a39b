"""Split of each layer over both tiers: keys of some layers in the page cache, values with direct I/O, concurrently.

Dual-Blade's groups use one tier while the other is idle. Here a layer's keys and values come over different links, and
arrive together if the shares match the speeds of the tiers.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_cache.block_table import BlockKey
from kv_cache.hardware import DEVICE, DIRECT, PAGE_CACHE
from kv_cache.iteration import Iteration
from kv_cache.placement_runner import GOLDEN
from kv_cache.policies._stream import stream
from kv_cache.scheduler import Policy

LARGE = 1 << 30  # bytes of a copy whose latency is negligible
PATIENCE = 4, 32  # iterations without a miss before feedback caches more: initial, and maximum after failures


class Split(Policy):
    """The same share of all layers is cached: half of each (keys) if that fits, else the keys of some layers.

    Args:
        ahead: Layers to prefetch.
        share: Fraction of the KV cache in the page cache; None: what it can hold and `_balanced` allows.
        feedback: Whether to cache less when most cached data was read from disk, and more after a period without
            misses: for a page cache of unknown size.
    """

    tiers: tuple[str, ...] = (PAGE_CACHE,)

    def __init__(self, ahead: int = 1, share: float | None = None, feedback: bool = False) -> None:
        self.ahead, self.share = ahead, share
        self._feeds_back = feedback
        self._feedback = _Feedback(0, 0)
        self._totals = 0, 0  # bytes read from files so far, and of these from the page cache
        self._most = 0  # parts of layers that the page cache holds
        self._planned_for = 0.0, 0  # bytes: the page cache, and a layer

    def layers(self, it: Iteration) -> None:
        most = self._planned(it) if self.share is None else int(len(it.parts) * self.share * len(it.layers))
        count = self._fed_back(it, most) if self._feeds_back else most
        cached = set([(layer, part) for part in it.parts for layer in _spread(it.layers)][:count])

        def home(block: BlockKey) -> str:
            return PAGE_CACHE if (block.layer, block.part) in cached else DIRECT

        stream(it, home, self.ahead)

    def _planned(self, it: Iteration) -> int:
        """Number of cached parts of layers; planned again when the page cache's limit or the stored bytes change.

        Requests that pause during a prefill keep their share of the cache.
        """
        layer_bytes = max(it.layer_bytes(), it.layer_bytes(it.final_tokens))
        if it.prefill:
            layer_bytes = max(layer_bytes, self._planned_for[1])
        sizes = it.capacity(PAGE_CACHE), layer_bytes
        if sizes != self._planned_for:
            self._planned_for = sizes
            cached_layers = int(min(len(it.layers), it.capacity(PAGE_CACHE) // layer_bytes))
            self._most = min(len(it.parts) * cached_layers, _balanced(it))
        return self._most

    def _fed_back(self, it: Iteration, most: int) -> int:
        """Number of cached parts under feedback: `most` at first and after `most` changes."""
        if self._feedback.most != most:
            self._feedback = _Feedback(most, most)
        totals = it.page_cache_hits(PAGE_CACHE) or (0, 0)
        read, hit = (now - before for now, before in zip(totals, self._totals, strict=True))
        self._totals = totals
        if read:
            self._feedback.update(read, hit)
        return self._feedback.count


def _balanced(it: Iteration) -> int:
    """Number of parts of layers read from the page cache in the time in which direct I/O reads the others."""
    parts = len(it.parts) * len(it.layers)
    cached_s, direct_s = (it.transfer_s(tier, DEVICE, LARGE) for tier in (PAGE_CACHE, DIRECT))
    return round(parts * direct_s / (cached_s + direct_s))


@dataclass(slots=True)
class _Feedback:
    """Controls the number of cached parts of layers by the hit rate of each iteration.

    Hit rate below one half: 1 less, then 2, then 4. Hit rate of 1 for `patience` iterations: 1 more, then 2, then 4. An
    increase that fails is undone, and doubles the patience.
    """

    most: int
    count: int
    change: int = 0
    calm: int = 0  # iterations without a miss
    patience: int = PATIENCE[0]
    settling: int = 0  # iterations until the last change takes effect

    def update(self, read: int, hit: int) -> None:
        """Adapt to the bytes that the last iteration read, and the bytes of these found in the cache."""
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


def _spread(layers: range) -> list[int]:
    """Layers in an order whose every prefix is spread over all of them (golden ratio)."""
    return sorted(layers, key=lambda layer: layer * GOLDEN % 1)
