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


def split(t: Turn, ahead: int = 1, share: float | None = None) -> None:
    """Of every layer the same share is cached: half of it in K where that fits, else K of some of the layers."""
    cached = t.memory.get("cached")
    if cached is None:
        halves = 2 * in_cache(t) if share is None else int(2 * share * len(t.layers))
        order = [(layer, part) for part in t.parts for layer in _spread(t.layers)]
        cached = t.memory["cached"] = set(order[:halves])

    def home(extent: Extent) -> str:
        return PAGE_CACHE if (extent.layer, extent.part) in cached else DIRECT

    stream(t, home, ahead)


def _spread(layers: range) -> list[int]:
    """Layers in an order of which every beginning is spread over all of them: by the golden ratio."""
    return sorted(layers, key=lambda layer: (layer * 0.6180339887498949) % 1)
