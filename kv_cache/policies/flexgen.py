"""FlexGen: the KV cache is in buffered files; the next layer is loaded while one computes.

Ying Sheng et al., FlexGen, ICML 2023, algorithm 1.
"""

from __future__ import annotations

from kv_cache.hardware import PAGE_CACHE
from kv_cache.iteration import Iteration
from kv_cache.policies._stream import stream


def flexgen(it: Iteration, home: str = PAGE_CACHE, ahead: int = 1) -> None:
    """Load each layer from its tier and write it back."""
    stream(it, lambda block: home, ahead)
