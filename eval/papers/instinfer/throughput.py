"""Figures 4, 12 and 13: tokens a second of the paper's five systems and of our paged method."""

from __future__ import annotations

from collections.abc import Sequence

from eval.experiment import Outcome
from eval.options import Picture, check_picture, numbers
from eval.papers.instinfer.options import (
    BatchSizes,
    CompressionFactor,
    DriveCount,
    Rows,
    Work,
    rows_outcome,
    run,
)
from eval.papers.instinfer.runs import Case, Runs
from eval.papers.instinfer.systems import DENSE, OURS, SPARF
from eval.papers.options import Machine, Simulated
from eval.plot import lines, save_figure

HOSTS = ("DeepSpeed", "FlexGen", "FlexGen-SparQ")
IN_DRIVES = (DENSE, SPARF, OURS)
COLUMNS = ("system", "batch", "tokens_per_s", "prefill_s", "step_s", "realtime_factor", "reason")


def cases(batches: Sequence[int], drives: int) -> list[Case]:
    """What `rows` needs."""
    return [Case(IN_DRIVES, batch, drives) for batch in batches]


def rows(runs: Runs, batches: Sequence[int], drives: int) -> Rows:
    """A row for each batch size and system."""
    made: Rows = []
    for batch in batches:
        host = [runs.host(system, batch, drives) for system in HOSTS]
        for result in [*host, *(runs.drive(system, batch, drives) for system in IN_DRIVES)]:
            made.append(
                {
                    "system": result.system,
                    "batch": batch,
                    "drives": drives,
                    "tokens_per_s": None if result.reason else result.tokens_per_s,
                    "prefill_s": result.prefill_s,
                    "step_s": result.step.total_s,
                    "realtime_factor": result.realtime_factor,
                    "reason": result.reason,
                }
            )
    return made


def experiment(
    machine: Machine,
    work: Work,
    simulated: Simulated,
    drives: DriveCount = 1,
    batch_sizes: BatchSizes = "4,16,32,64,128,256",
    compression: CompressionFactor = 8,
    plot: Picture = None,
) -> Outcome:
    """Tokens a second of the paper's five systems and of our paged method (figures 4, 12, 13)."""
    check_picture(plot)
    setup, batches = work.setup(machine, simulated, compression), numbers("batch_sizes", batch_sizes)
    runs = run(simulated, setup, cases(batches, drives))
    found = rows(runs, batches, drives)
    if plot:
        save_figure(lines(found, "batch", "tokens_per_s", "system"), plot)
    return rows_outcome(f"Throughput, {setup.model.name}, {drives} drives", found, COLUMNS, runs)
