"""Latency breakdown of a command in simulated time."""

from __future__ import annotations

from csd_spec.units import UNITS, check_unit


class LatencyBreakdown:
    """Current simulated time of a command, and the time spent per unit; the parts sum to the total.

    Units are those of `csd_spec.units`; others raise ValueError.
    """

    def __init__(self, start_ns: int) -> None:
        self.start_ns = self.now_ns = start_ns
        self.breakdown_ns: dict[str, int] = {}

    def spend(self, unit: str, ns: int) -> None:
        """Add `ns` spent in `unit`."""
        if unit not in UNITS:
            check_unit(unit)
        assert ns >= 0, f"{unit}: {ns} ns"
        self.breakdown_ns[unit] = self.breakdown_ns.get(unit, 0) + ns
        self.now_ns += ns

    def until(self, unit: str, finish_ns: int) -> None:
        """Add the time until `finish_ns` to `unit`; nothing if that is in the past."""
        if unit not in UNITS:
            check_unit(unit)
        ns = finish_ns - self.now_ns if finish_ns > self.now_ns else 0
        self.breakdown_ns[unit] = self.breakdown_ns.get(unit, 0) + ns
        self.now_ns += ns
