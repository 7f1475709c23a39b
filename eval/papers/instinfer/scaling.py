"""Figure 17a: throughput over that of the first number of drives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from csd_spec.network import NETWORKS, network_named
from vcsd_eval.experiment import Outcome
from vcsd_eval.options import Picture, check_picture, number, numbers
from vcsd_eval.papers.instinfer.options import (
    BatchSizes,
    CompressionFactor,
    DriveCounts,
    Rows,
    Sweep,
    Work,
    rows_outcome,
    run,
)
from vcsd_eval.papers.instinfer.runs import InStorageCase, Runs
from vcsd_eval.papers.instinfer.systems import BATCHED_DENSE, DENSE, OURS, SPARF, Result
from vcsd_eval.papers.options import MachineOptions, Simulated
from vcsd_eval.plot import lines, save_figure

IN_DRIVES = (DENSE, SPARF, BATCHED_DENSE, OURS)
COLUMNS = (
    "system",
    "drives",
    "tokens_per_s",
    "speedup",
    "efficiency",
    "step_s",
    "kv_s",
    "other_s",
    "network_s",
    "limit",
    "reason",
)


def cases(batch: int, counts: Sequence[int]) -> list[InStorageCase]:
    """What `rows` needs."""
    return [InStorageCase(IN_DRIVES, batch, drives) for drives in counts]


def rows(runs: Runs, batch: int, counts: Sequence[int]) -> Rows:
    """A row for each number of drives and system."""
    entries: Rows = []
    first: dict[str, Result] = {}
    for drives in counts:
        for result in (runs.drive(system, batch, drives) for system in IN_DRIVES):
            base = first.setdefault(result.system, result)
            speedup = result.tokens_per_s / base.tokens_per_s if base.tokens_per_s else None
            entries.append(
                {
                    "system": result.system,
                    "drives": drives,
                    "tokens_per_s": result.tokens_per_s,
                    "speedup": speedup,
                    "efficiency": speedup and speedup * base.drives / drives,
                    "step_s": result.step.total_s,
                    "kv_s": result.step.kv_s,
                    "other_s": result.step.other_s,
                    "network_s": result.step.network_s,
                    "limit": result.step.largest if result.tokens_per_s else None,
                    "reason": result.reason,
                }
            )
    return entries


@dataclass(frozen=True, slots=True)
class Scale:
    """Numbers of drives, and what they serve."""

    drives: DriveCounts = "1,2,4,8,20"
    batch_sizes: BatchSizes = "256"
    compression: CompressionFactor = 8
    network: Annotated[str | None, typer.Option(help=f"network to the drives: {', '.join(NETWORKS)}")] = None


def experiment(
    machine: MachineOptions, work: Work, simulated: Simulated, sweep: Sweep, scale: Scale, plot: Picture = None
) -> Outcome:
    """Throughput over the number of drives (figure 17a), its efficiency, and the resource that limits it."""
    check_picture(plot)
    setup, counts = work.setup(machine, simulated, scale.compression), numbers("drives", scale.drives)
    setup = replace(setup, network=network_named(scale.network) if scale.network else None)
    batch = number("batch_sizes", scale.batch_sizes)
    runs = run(simulated, setup, cases(batch, counts), sweep)
    entries = rows(runs, batch, counts)
    if plot:
        save_figure(lines(entries, "drives", "speedup", "system"), plot)
    over = f", {scale.network}" if scale.network else ""
    return rows_outcome(f"Scaling, {setup.model.name}, batch {batch}{over}", entries, COLUMNS, runs)
