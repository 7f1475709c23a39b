"""Figures 5, 14 and 15: time breakdown of a decode step.

Shares are fractions of the sum of the three parts, so that they add up to one. If one part is hidden under another, the
step is shorter than that sum by `hidden_s`.
"""

from __future__ import annotations

from collections.abc import Sequence

from vcsd_eval.experiment import Outcome
from vcsd_eval.options import Picture, check_picture, numbers
from vcsd_eval.papers.instinfer.options import (
    BatchSizes,
    CompressionFactor,
    DriveCount,
    Rows,
    Work,
    rows_outcome,
    run,
)
from vcsd_eval.papers.instinfer.runs import InStorageCase, Runs
from vcsd_eval.papers.instinfer.systems import IN_DRIVES, Result
from vcsd_eval.papers.options import MachineOptions, Simulated
from vcsd_eval.plot import save_figure, stack

HOSTS = ("FlexGen", "FlexGen-SparQ")
SHARES = ("kv_share", "engine_share", "other_share")
COLUMNS = ("system", "batch", "step_s", *SHARES, "hidden_s", "reason")


def cases(batches: Sequence[int], drives: int) -> list[InStorageCase]:
    """What `rows` needs."""
    return [InStorageCase(IN_DRIVES, batch, drives) for batch in batches]


def rows(runs: Runs, batches: Sequence[int], drives: int) -> Rows:
    """A row for each batch size and system."""
    entries: Rows = []
    for batch in batches:
        entries += [_row(runs.host(system, batch, drives), drives) for system in HOSTS]
        entries += [_row(runs.drive(system, batch, drives), drives) for system in IN_DRIVES]
    return entries


def _row(result: Result, drives: int) -> dict[str, object]:
    step = result.step
    parts = {"kv": step.kv_s, "engine": step.engine_s, "other": step.other_s}
    return {
        "system": result.system,
        "batch": result.batch,
        "drives": drives,
        "step_s": step.total_s,
        **{f"{name}_s": seconds for name, seconds in parts.items()},
        "hidden_s": step.hidden_s,
        **{f"{name}_share": seconds / step.parts_s if step.parts_s else None for name, seconds in parts.items()},
        "reason": result.reason,
    }


def experiment(
    machine: MachineOptions,
    work: Work,
    simulated: Simulated,
    drives: DriveCount = 1,
    batch_sizes: BatchSizes = "4,64,256",
    compression: CompressionFactor = 8,
    plot: Picture = None,
) -> Outcome:
    """Time breakdown of a decode step (figures 5, 14, 15)."""
    check_picture(plot)
    setup, batches = work.setup(machine, simulated, compression), numbers("batch_sizes", batch_sizes)
    runs = run(simulated, setup, cases(batches, drives))
    entries = rows(runs, batches, drives)
    if plot:
        save_figure(stack(entries, "system", SHARES), plot)
    return rows_outcome(f"Decode step, {setup.model.name}, {drives} drives", entries, COLUMNS, runs)
