"""Pairs split over both tiers: K of as many layers as fit behind the page cache, V past it, at the same time.

Dual-Blade's groups use one tier while the other rests. Here a layer's K and V come over different links, and arrive
together when both tiers are as fast as they are large.
"""

from __future__ import annotations

from residency.machine import DIRECT, PAGE_CACHE
from residency.policies._stream import stream
from residency.policies.dual_blade import in_cache
from residency.table import Extent
from residency.turn import Turn


def split(t: Turn, ahead: int = 1, share: float | None = None, feedback: bool = False) -> None:
    """Of every layer the same share is cached: half of it in K where that fits, else K of some of the layers.

    share: of K and V, instead of what the cache keeps. feedback: less is cached when most of that had to come from the
    disk again.
    """
    if "cached" not in t.memory:
        halves = 2 * in_cache(t) if share is None else int(2 * share * len(t.layers))
        t.memory["cached"] = [(layer, part) for part in t.parts for layer in _spread(t.layers)][:halves]
    if feedback:
        _yield(t)
    cached = set(t.memory["cached"])

    def home(extent: Extent) -> str:
        return PAGE_CACHE if (extent.layer, extent.part) in cached else DIRECT

    stream(t, home, ahead)


def _yield(t: Turn) -> None:
    """Behind a turn that found less than half of what it read, cache one part of a layer less; then two, then four."""
    found = t.found(PAGE_CACHE) or (0, 0)
    read, hit = (now - before for now, before in zip(found, t.memory.get("found", (0, 0)), strict=True))
    t.memory["found"] = found
    fewer = t.memory["fewer"] = max(1, 2 * t.memory.get("fewer", 0)) if 2 * hit < read else 0
    t.memory["cached"] = t.memory["cached"][: max(0, len(t.memory["cached"]) - fewer)]


def _spread(layers: range) -> list[int]:
    """Layers in an order of which every beginning is spread over all of them: by the golden ratio."""
    return sorted(layers, key=lambda layer: (layer * 0.6180339887498949) % 1)
