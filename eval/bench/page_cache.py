"""The cliff of the page cache, for real: KV that is read round and round in a little less memory than it has.

Dual-Blade (arXiv 2604.26557) keeps as many layers in the page cache as fit and reads the others past it.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from csd_io.cgroup import Cgroup, temporary_cgroup
from eval.bench import child
from eval.bench.cyclic import Job, as_text
from eval.experiment import Outcome
from vcsd.progress import Tick, no_tick, progress
from vcsd.tables import table

POLICIES = {"baseline": False, "dual-blade": True}  # whether what has no room goes past the page cache
MOST_BASELINE_HITS, MOST_OFF = 0.05, 0.03
CHILD_S = 600.0


@dataclass(frozen=True, slots=True)
class Load:
    """K and V, and the memory that there is for them."""

    layers: Annotated[int, typer.Option(min=2, max=128, help="layers, with K and V of each")] = 16
    tensor_mib: Annotated[int, typer.Option(min=1, max=256, help="MiB of a layer's K")] = 8
    rounds: Annotated[
        int, typer.Option("--repeats", min=1, max=1000, help="times that all is read, after a first one")
    ] = 4
    limits: Annotated[str, typer.Option(help="limits of memory, as shares of K and V")] = "0.375,0.625,0.875"
    folder: Annotated[Path | None, typer.Option(help="on which disk (default: that of temporary files)")] = None

    @property
    def kv_bytes(self) -> int:
        """Of all tensors."""
        return 2 * self.layers * self.tensor_mib << 20

    def shares(self) -> list[float]:
        """The limits; raises ValueError for what is none."""
        try:
            found = [float(each) for each in self.limits.split(",")]
        except ValueError as error:
            raise ValueError(f"limits = {self.limits!r}: needs numbers with commas between them") from error
        if not all(0.01 <= each <= 4 for each in found):
            raise ValueError(f"limits = {self.limits!r}: each must be at least 0.01, and at most 4")
        return found


def bench_page_cache(load: Load, tick: Tick = no_tick) -> dict[str, Any]:
    """Hits and bytes of both policies at every limit, each in a process of its own.

    how: what limits the memory, a control group or, where this user may make none (`why`), a cache of our own with that
    many bytes. hit_ratio: bytes that no disk was asked for, by the kernel's count of this process (kernel_bytes), over
    those that were read. device_bytes: what anybody has read from the disk meanwhile.
    """
    rows: list[dict[str, Any]] = []
    how: str = "lru"
    why = None
    with tempfile.TemporaryDirectory(prefix="page-cache-", dir=load.folder) as folder:
        for share in load.shares():
            for policy, direct in POLICIES.items():
                limit = int(share * load.kv_bytes)
                with ExitStack() as stack:
                    try:
                        group: Cgroup | None = stack.enter_context(temporary_cgroup(limit))
                    except OSError as error:
                        group, why = None, str(error)
                    how = group.how if group else "lru"
                    job = Job(
                        folder=folder,
                        layers=load.layers,
                        tensor_bytes=load.tensor_mib << 20,
                        rounds=load.rounds,
                        direct=direct,
                        lru_bytes=None if group else limit,
                    )
                    rows.append({"cache_share": share, "limit_bytes": limit, "policy": policy} | _child(job, group))
                tick(None)
    return {"how": how, "why": why, "kv_bytes": load.kv_bytes, "rounds": load.rounds, "rows": rows}


def _child(job: Job, group: Cgroup | None) -> dict[str, Any]:
    """Have a job done by a process in a group; raises OSError where it ends without figures."""
    try:
        return child.done("eval.bench.cyclic", as_text(job), group, CHILD_S)
    except OSError as error:
        raise OSError(f"reading in {job.folder}: {error}") from error


def off(row: dict[str, Any]) -> bool:
    """Whether a row is not what the cliff and the way around it are: nothing hits, or all that was kept does."""
    if row["policy"] == "baseline":
        return bool(row["cache_share"] < 0.9 and row["hit_ratio"] > MOST_BASELINE_HITS)
    return bool(abs(row["hit_ratio"] - row["n1"] / row["layers"]) > MOST_OFF)


def experiment(load: Load) -> Outcome:
    """The cliff of the page cache: hits of K and V that are read round and round, by the kernel's count."""
    with progress("processes", len(load.shares()) * len(POLICIES)) as tick:
        result = bench_page_cache(load, tick)
    title = f"Page cache, {load.kv_bytes >> 20} MiB of K and V, limited by {result['how']}"
    shown = [
        (
            row["policy"],
            f"{row['cache_share']:.3f}",
            f"{row['n1']} of {row['layers']}",
            f"{row['hit_ratio']:.3f}",
            f"{row['kernel_bytes'] >> 20:,}",
            str(row["wrong"]),
        )
        for row in result["rows"]
    ]
    columns = ("policy", "limit", "layers cached", "hits", "MiB from disk", "wrong")
    notes = [f"no control group: {result['why']}"] if result["why"] else []
    failed = any(row["wrong"] or off(row) for row in result["rows"])
    return Outcome(result, [table(title, columns, shown)], notes, failed)
