"""Where a command's modelled time went."""

from __future__ import annotations

from csd_spec.units import UNITS, check_unit


class Stopwatch:
    """A running modelled time and the share of each unit; the shares add up to the whole.

    Units are those of `csd_spec.units`: whatever else is timed raises ValueError with its name.
    """

    def __init__(self, start_ns: int) -> None:
        self.start_ns = self.now_ns = start_ns
        self.breakdown_ns: dict[str, int] = {}

    def spend(self, unit: str, ns: int) -> None:
        """`unit` is busy for `ns` from now."""
        if unit not in UNITS:
            check_unit(unit)
        self.breakdown_ns[unit] = self.breakdown_ns.get(unit, 0) + ns
        self.now_ns += ns

    def until(self, unit: str, finish_ns: int) -> None:
        """`unit` ends at `finish_ns`, or has ended."""
        if unit not in UNITS:
            check_unit(unit)
        ns = finish_ns - self.now_ns if finish_ns > self.now_ns else 0
        self.breakdown_ns[unit] = self.breakdown_ns.get(unit, 0) + ns
        self.now_ns += ns
