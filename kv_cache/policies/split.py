"""Pairs split over both tiers: K of as many layers as fit behind the page cache, V past it, at the same time.

Dual-Blade's groups use one tier while the other rests. Here a layer's K and V come over different links, and arrive
together when both tiers are as fast as they are large.
"""

from __future__ import annotations

from kv_cache.block_table import BlockKey
from kv_cache.hardware import DEVICE, DIRECT, PAGE_CACHE
from kv_cache.iteration import Iteration
from kv_cache.policies._stream import stream
from kv_cache.policies.dual_blade import in_cache

LARGE = 1 << 30  # bytes of a copy whose start and first piece count little


def split(it: Iteration, ahead: int = 1, share: float | None = None, feedback: bool = False) -> None:
    """Of every layer the same share is cached: half of it in K where that fits, else K of some of the layers.

    Args:
        it: The iteration.
        ahead: Layers that come before they are attended.
        share: Of K and V that is cached, instead of what the cache keeps and `_balanced` allows.
        feedback: Whether less is cached when most of that had to come from the disk again.
    """
    if "cached" not in it.memory:
        halves = min(2 * in_cache(it), _balanced(it)) if share is None else int(2 * share * len(it.layers))
        it.memory["cached"] = [(layer, part) for part in it.parts for layer in _spread(it.layers)][:halves]
    if feedback:
        _yield(it)
    cached = set(it.memory["cached"])

    def home(block: BlockKey) -> str:
        return PAGE_CACHE if (block.layer, block.part) in cached else DIRECT

    stream(it, home, ahead)


def _balanced(it: Iteration) -> int:
    """How many of all layers' K and V come from the page cache in the time in which the others come past it."""
    halves = 2 * len(it.layers)
    cached_s, direct_s = (it.transfer_s(tier, DEVICE, LARGE) for tier in (PAGE_CACHE, DIRECT))
    return round(halves * direct_s / (cached_s + direct_s))


def _yield(it: Iteration) -> None:
    """After an iteration with under half of its reads cached, cache one part of a layer less; then two, then four."""
    found = it.page_cache_hits(PAGE_CACHE) or (0, 0)
    read, hit = (now - before for now, before in zip(found, it.memory.get("found", (0, 0)), strict=True))
    it.memory["found"] = found
    fewer = it.memory["fewer"] = max(1, 2 * it.memory.get("fewer", 0)) if 2 * hit < read else 0
    it.memory["cached"] = it.memory["cached"][: max(0, len(it.memory["cached"]) - fewer)]


def _spread(layers: range) -> list[int]:
    """Layers in an order of which every beginning is spread over all of them: by the golden ratio."""
    return sorted(layers, key=lambda layer: (layer * 0.6180339887498949) % 1)
