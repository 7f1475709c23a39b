"""The page-cache cliff, measured: KV data read cyclically with slightly less memory than their size.

Dual-Blade (arXiv 2604.26557) keeps in the page cache the layers that fit and reads the others with direct I/O.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from csd_io.cgroup import Cgroup, temporary_cgroup
from vcsd.progress import Tick, no_tick, progress
from vcsd.tables import table
from vcsd_eval.bench import child
from vcsd_eval.bench.cyclic import CyclicRead, as_text
from vcsd_eval.experiment import Outcome

POLICIES = {"baseline": False, "dual-blade": True}  # direct I/O for tensors that do not fit
MOST_BASELINE_HITS, MOST_OFF = 0.05, 0.03
CHILD_S = 600.0


@dataclass(frozen=True, slots=True)
class PageCacheLoad:
    """Size of the KV cache and the memory limits."""

    layers: Annotated[int, typer.Option(min=2, max=128, help="number of layers, each with K and V")] = 16
    tensor_mib: Annotated[int, typer.Option(min=1, max=256, help="size of a layer's K, MiB")] = 8
    rounds: Annotated[
        int, typer.Option("--repeats", min=1, max=1000, help="measured rounds over all tensors, after a warm-up")
    ] = 4
    limits: Annotated[str, typer.Option(help="comma-separated memory limits, as fractions of the KV cache")] = (
        "0.375,0.625,0.875"
    )
    folder: Annotated[Path | None, typer.Option(help="folder of the files (default: that of temporary files)")] = None

    @property
    def kv_bytes(self) -> int:
        """Size of all tensors, bytes."""
        return 2 * self.layers * self.tensor_mib << 20

    def shares(self) -> list[float]:
        """Limits as fractions of the KV cache; raises ValueError for an invalid one."""
        try:
            found = [float(each) for each in self.limits.split(",")]
        except ValueError as error:
            raise ValueError(f"limits = {self.limits!r}: must be comma-separated numbers") from error
        if not all(0.01 <= each <= 4 for each in found):
            raise ValueError(f"limits = {self.limits!r}: each must be from 0.01 to 4")
        return found


def bench_page_cache(load: PageCacheLoad, tick: Tick = no_tick) -> dict[str, Any]:
    """Hits and bytes of both policies at every limit, each in a new process.

    Columns:
        how: Memory limit: a control group or, if this user may not create one (`why`), a user-space cache of that size.
        hit_ratio: Bytes not read from a disk, by the kernel's count for this process (kernel_bytes), over the bytes
            that the process read.
        device_bytes: Bytes read from the disk by all processes in the same time.
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
                    job = CyclicRead(
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


def _child(job: CyclicRead, group: Cgroup | None) -> dict[str, Any]:
    """Run a job in a process of a group; raises OSError if it exits without figures."""
    try:
        return child.done("vcsd_eval.bench.cyclic", as_text(job), group, CHILD_S)
    except OSError as error:
        raise OSError(f"reading in {job.folder}: {error}") from error


def off(row: dict[str, Any]) -> bool:
    """Whether a row contradicts the cliff or its fix.

    The baseline must have almost no hits, and the hit rate of Dual-Blade must be the fraction of layers that it caches.
    """
    if row["policy"] == "baseline":
        return bool(row["cache_share"] < 0.9 and row["hit_ratio"] > MOST_BASELINE_HITS)
    return bool(abs(row["hit_ratio"] - row["n1"] / row["layers"]) > MOST_OFF)


def experiment(load: PageCacheLoad) -> Outcome:
    """The page-cache cliff: hit rates of KV data that are read cyclically, by the kernel's count."""
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
