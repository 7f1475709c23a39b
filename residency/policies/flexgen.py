"""FlexGen: KV lives in files behind the page cache; the next layer comes while one computes.

Ying Sheng et al., FlexGen, ICML 2023, algorithm 1.
"""

from __future__ import annotations

from residency.machine import PAGE_CACHE
from residency.policies._stream import stream
from residency.turn import Turn


def flexgen(t: Turn, home: str = PAGE_CACHE, ahead: int = 1) -> None:
    """Every layer comes from its home and goes back to it."""
    stream(t, lambda extent: home, ahead)
