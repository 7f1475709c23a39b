"""Figure 16: seconds of each unit of a drive in the middle step."""

from __future__ import annotations

from typing import Any

from vcsd.progress import status
from vcsd_eval.experiment import Outcome, flat
from vcsd_eval.options import Picture, check_picture, number
from vcsd_eval.papers.instinfer.options import (
    BatchSizes,
    EnoughDrives,
    Rows,
    Sparse,
    Work,
    rows_outcome,
    run,
)
from vcsd_eval.papers.instinfer.runs import InStorageCase, Runs, enough
from vcsd_eval.papers.instinfer.systems import DENSE, IN_DRIVES, InStorageSystem, Setup
from vcsd_eval.papers.options import MachineOptions, Simulated
from vcsd_eval.plot import lines, save_figure

COLUMNS = ("system", "unit", "s", "share")


def cases(batch: int, drives: int, systems: tuple[InStorageSystem, ...] = IN_DRIVES) -> list[InStorageCase]:
    """What `rows` needs."""
    return [InStorageCase(systems, batch, drives)]


def rows(runs: Runs, batch: int, drives: int, systems: tuple[InStorageSystem, ...] = IN_DRIVES) -> Rows:
    """A row for each system and unit."""
    entries: Rows = []
    for result in (runs.drive(system, batch, drives) for system in systems):
        total = sum((result.units_s or {}).values())
        for unit, seconds in (result.units_s or {}).items():
            entries.append({"system": result.system, "unit": unit, "s": seconds, "share": seconds / total})
    return entries


def experiment(
    machine: MachineOptions,
    work: Work,
    simulated: Simulated,
    sparse: Sparse,
    drives: EnoughDrives = None,
    batch_sizes: BatchSizes = "64",
    plot: Picture = None,
) -> Outcome:
    """Seconds of each unit of a drive in the middle decode step (figure 16), and how tokens would best be shared by
    drives and a GPU."""
    check_picture(plot)
    setup, batch = work.setup(machine, simulated, sparse.compression), number("batch_sizes", batch_sizes)
    systems: tuple[InStorageSystem, ...] = IN_DRIVES
    if sparse.recorded_model:
        with status("recording attention"):
            from vcsd_eval.papers.instinfer.page_shares import recorded_system

            systems += (recorded_system(setup, sparse.recorded_model),)
    drives = drives or enough(setup, systems, batch)
    runs = run(simulated, setup, cases(batch, drives, systems))
    entries = rows(runs, batch, drives, systems)
    if plot:
        save_figure(lines(entries, "unit", "s", "system"), plot)
    units = rows_outcome(f"A drive's units, {setup.model.name}, batch {batch}, {drives} drives", entries, COLUMNS, runs)
    dense = runs.drive(DENSE, batch, drives)
    if dense.reason:
        return units
    shared = split(setup, batch, dense.step.kv_s, dense.step.engine_s)
    shown = flat("tokens shared by drives and the GPU, dense", shared).shown
    return Outcome(units.result | {"split": shared}, [*units.shown, *shown])


def split(setup: Setup, batch: int, flash_s: float, engine_s: float) -> dict[str, Any]:
    """Dense attention of a step to all tokens: in drives, on the GPU, or split between them.

    In drives, units run one after the other; on the GPU, the KV data is in its memory or is copied over the link. The
    split is the fraction of tokens in drives at which both finish at the same time. engine_times: speedup of the engine
    at which flash is the only bottleneck of a drive.
    """
    drives_s, gpu_s = flash_s + engine_s, setup.attention_s(batch)
    link_s = max(gpu_s, setup.kv_bytes(batch, float(setup.steps.mean())) / (setup.host.gpu_link_gb_per_s * 1e9))
    shares = {name: s / (s + drives_s) for name, s in (("gpu", gpu_s), ("link", link_s))}
    return {
        "bound_by": "engine" if engine_s > flash_s else "flash",
        "flash_s": flash_s,
        "engine_s": engine_s,
        "engine_times": engine_s / flash_s,
        "gpu_memory_s": gpu_s,
        "gpu_link_s": link_s,
        "in_drives_beside_gpu_memory": shares["gpu"],
        "in_drives_beside_link": shares["link"],
        "step_with_gpu_memory_s": shares["gpu"] * drives_s,
        "step_with_link_s": shares["link"] * drives_s,
    }
