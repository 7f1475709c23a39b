"""Figure 16: seconds of each unit of a drive in the middle step."""

from __future__ import annotations

from eval.experiment import Outcome
from eval.options import Picture, check_picture, number
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

IN_DRIVES = (DENSE, SPARF, OURS)
COLUMNS = ("system", "unit", "s", "share")


def cases(batch: int, drives: int) -> list[Case]:
    """What `rows` needs."""
    return [Case(IN_DRIVES, batch, drives)]


def rows(runs: Runs, batch: int, drives: int) -> Rows:
    """A row for each system and unit."""
    made: Rows = []
    for result in (runs.drive(system, batch, drives) for system in IN_DRIVES):
        total = sum((result.units_s or {}).values())
        for unit, seconds in (result.units_s or {}).items():
            made.append({"system": result.system, "unit": unit, "s": seconds, "share": seconds / total})
    return made


def experiment(
    machine: Machine,
    work: Work,
    simulated: Simulated,
    drives: DriveCount = 1,
    batch_sizes: BatchSizes = "64",
    compression: CompressionFactor = 8,
    plot: Picture = None,
) -> Outcome:
    """Seconds of each unit of a drive in the middle decode step (figure 16)."""
    check_picture(plot)
    setup, batch = work.setup(machine, simulated, compression), number("batch_sizes", batch_sizes)
    runs = run(simulated, setup, cases(batch, drives))
    found = rows(runs, batch, drives)
    if plot:
        save_figure(lines(found, "unit", "s", "system"), plot)
    return rows_outcome(f"A drive's units, batch {batch}", found, COLUMNS, runs)
