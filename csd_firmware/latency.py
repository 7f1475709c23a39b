"""Latency breakdown of a command in simulated time."""

from __future__ import annotations

from csd_firmware.trace import CommandTrace, Segment
from csd_spec.units import UNITS, check_unit


class LatencyBreakdown:
    """Current simulated time of a command, and the time spent per unit; the parts sum to the total.

    Units are those of `csd_spec.units`; others raise ValueError.
    """

    def __init__(self, start_ns: int, trace: CommandTrace | None = None) -> None:
        """Start at `start_ns`. `trace`: records the parts in order."""
        self.start_ns = self.now_ns = start_ns
        self.breakdown_ns: dict[str, int] = {}
        self.trace = trace

    def spend(self, unit: str, ns: int) -> None:
        """Add `ns` spent in `unit`."""
        if unit not in UNITS:
            check_unit(unit)
        assert ns >= 0, f"{unit}: {ns} ns"
        self._add(unit, ns)

    def until(self, unit: str, finish_ns: int) -> None:
        """Add the time until `finish_ns` to `unit`; nothing if that is in the past."""
        if unit not in UNITS:
            check_unit(unit)
        ns = finish_ns - self.now_ns if finish_ns > self.now_ns else 0
        self._add(unit, ns)

    def _add(self, unit: str, ns: int) -> None:
        self.breakdown_ns[unit] = self.breakdown_ns.get(unit, 0) + ns
        if self.trace and ns:
            self.trace.path.append(Segment(unit, self.now_ns, self.now_ns + ns))
        self.now_ns += ns
