"""Report of a session: where its KV data was, what moved, and what the drives did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from rich.console import Group
from rich.table import Table

from host_driver.hf.shape import FULL
from host_driver.kv_table import KvTable
from kv_cache.hardware import CSD, DEVICE, PAGE_CACHE
from vcsd.drive_report import DriveReport
from vcsd.tables import Printable, table


@dataclass(frozen=True, slots=True)
class Report(Printable):
    """Report of a session. Bytes are in whole blocks; stalls are wall-clock time for which the model waited.

    Attributes:
        policy: Name of the policy.
        why: Reason of a policy that selected another one.
        iterations: Number of forwards.
        layers: Layers by kind; those with full attention are in tiers or drives, the others stay with the model.
        tiers: Limit and peak of each tier.
        routes: Copies, bytes and stalls of each route.
        page_cache: Limit, bytes read from buffered files, and bytes of these found in the page cache (None if the
            kernel does not report it).
        drives: What the drives did; None: there are none.
    """

    policy: str
    why: str
    iterations: int
    layers: dict[str, list[int]]
    tiers: list[dict[str, Any]]
    routes: list[dict[str, Any]]
    page_cache: dict[str, Any]
    drives: DriveReport | None = None

    @classmethod
    def of(cls, kv: KvTable, policy: str, kinds: Sequence[str], drives: DriveReport | None) -> Report:
        """Build a report of the work so far.

        Args:
            kv: KV data of the session.
            policy: Name of its policy.
            kinds: Kind of each layer of the model.
            drives: What its drives did, if it has some.
        """
        with kv.access.hold():
            kv.real.settle()
            return cls._of(kv, policy, kinds, drives)

    @classmethod
    def _of(cls, kv: KvTable, policy: str, kinds: Sequence[str], drives: DriveReport | None) -> Report:
        run, files, modelled = kv.runner, kv.files, kv.simulated_bytes()
        used = {name for name, peak in run.table.peak.items() if peak} | {DEVICE}
        limits = run.machine.tiers
        return cls(
            policy=policy,
            why=kv.policy.why,
            iterations=run.iterations,
            layers={
                kind: [number for number, layer_kind in enumerate(kinds) if layer_kind == kind]
                for kind in dict.fromkeys(kinds)
            },
            tiers=[
                {"name": name, "limit_bytes": limits[name].limit_bytes, "peak_bytes": run.table.peak[name]}
                for name in limits
                if name in used
            ],
            routes=[
                {
                    "name": name,
                    "copies": counts.copies,
                    "bytes": kv.real.moved[name],
                    "simulated_bytes": None if modelled is None else modelled.get(name, 0),
                    "stall_s": kv.real.stalls_s.get(name, 0.0),
                }
                for name, counts in sorted(run.traffic.items())
            ],
            page_cache={
                "limit_bytes": limits[PAGE_CACHE].cache_bytes,
                "read_bytes": files.read_bytes,
                "hit_bytes": files.hit_bytes,
            },
            drives=drives,
        )

    def to_dict(self) -> dict[str, Any]:
        """The report in the format of `vcsd run -o json`."""
        of_cache = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "drives"}
        return {"kv_cache": of_cache} | (self.drives.to_dict() if self.drives else {})

    def tables(self, timed: bool = True) -> Group:
        """The tables; `timed`: with the mean time of a decode step in drives."""
        parts: list[Group | Table] = [self.drives.tables(timed)] if self.drives else []
        elsewhere = any(tier["peak_bytes"] for tier in self.tiers if tier["name"] != CSD)
        if self.routes or elsewhere or not self.drives:
            parts += [self._tier_table(), self._route_table()]
        return Group(*parts)

    def _tier_table(self) -> Table:
        some, every = len(self.layers[FULL]), sum(map(len, self.layers.values()))
        of = f" of {some} of {every} layers" if some < every else ""
        title = f"KV cache{of} in tiers: {self.policy}" + (f" ({self.why})" if self.why else "")
        rows = [(tier["name"], _mib(tier["limit_bytes"]), _mib(tier["peak_bytes"])) for tier in self.tiers]
        return table(title, ("tier", "limit, MiB", "most, MiB"), rows)

    def _route_table(self) -> Table:
        rows = [
            (route["name"], str(route["copies"]), _mib(route["bytes"]), f"{route['stall_s']:.2f}")
            for route in self.routes
        ]
        read, hit = self.page_cache["read_bytes"], self.page_cache["hit_bytes"]
        cached = f", {hit / read:.1%} of what was read in files was cached" if read and hit is not None else ""
        return table(f"Moved in {self.iterations} forwards{cached}", ("route", "copies", "MiB", "waited, s"), rows)


def _mib(nbytes: float | None) -> str:
    return "any" if nbytes is None else f"{nbytes / 2**20:,.1f}"
