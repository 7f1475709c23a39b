"""FlexGen: the KV cache is in buffered files; the next layer is loaded while one computes.

Ying Sheng et al., FlexGen, ICML 2023, algorithm 1.
"""

from __future__ import annotations

from kv_cache.hardware import PAGE_CACHE
from kv_cache.iteration import Iteration
from kv_cache.policies._stream import stream
from kv_cache.scheduler import Policy


class FlexGen(Policy):
    """Each layer is loaded from `home` and written back, `ahead` layers before its use."""

    tiers: tuple[str, ...] = (PAGE_CACHE,)

    def __init__(self, home: str = PAGE_CACHE, ahead: int = 1) -> None:
        self.home, self.ahead = home, ahead

    def layers(self, it: Iteration) -> None:
        stream(it, lambda block: self.home, self.ahead)
