"""The engine's clock: cycles of each unit from the work it is given."""

from __future__ import annotations

from csd_spec import EngineSpec

_TOPK_PASSES = 3  # histogram, threshold, collect


class EngineClock:
    """Modelled time of attention arithmetic, in nanoseconds.

    Softmax runs in the shadow of the products that feed it and is part of macs_per_cycle.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec

    def topk_ns(self, scores: int) -> int:
        """argtopk over `scores` values in all."""
        return self._ns(-(-_TOPK_PASSES * scores // self.spec.topk_ways))

    def macs_ns(self, macs: int) -> int:
        """`macs` multiply-accumulates by all kernels together."""
        return self._ns(-(-macs // self.spec.macs_per_cycle))

    def _ns(self, cycles: int) -> int:
        return -(-cycles * 1_000_000_000 // self.spec.clock_hz)
