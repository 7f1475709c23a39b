"""Figure 17b: SparF over its compression; pages touched as recorded, scaled to the paper's at 1/8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated

import typer

from vcsd.progress import status
from vcsd_eval.experiment import Outcome
from vcsd_eval.options import Picture, check_picture, number, numbers
from vcsd_eval.papers.instinfer.options import BatchSizes, DriveCount, RecordedModel, Rows, Work, rows_outcome, run
from vcsd_eval.papers.instinfer.runs import InStorageCase, Runs
from vcsd_eval.papers.instinfer.systems import DENSE, SPARF, InStorageSystem
from vcsd_eval.papers.options import MachineOptions, Simulated
from vcsd_eval.plot import lines, save_figure

COLUMNS = ("compression", "token_page_share", "tokens_per_s", "step_s", "reason")


def _system(compression: float, page_shares: Mapping[float, float]) -> InStorageSystem:
    if compression == 1:
        return DENSE
    share = page_shares[compression]
    return replace(SPARF, name=f"1/{compression:g}", compression=compression, page_share=share)


def cases(
    batch: int, drives: int, compressions: Sequence[float], page_shares: Mapping[float, float]
) -> list[InStorageCase]:
    """What `rows` needs. page_shares: of token pages, by compression."""
    return [InStorageCase(tuple(_system(c, page_shares) for c in compressions), batch, drives)]


def rows(
    runs: Runs, batch: int, drives: int, compressions: Sequence[float], page_shares: Mapping[float, float]
) -> Rows:
    """A row for each compression."""
    entries: Rows = []
    for c in compressions:
        result = runs.drive(_system(c, page_shares), batch, drives)
        entries.append(
            {
                "compression": c,
                "drives": drives,
                "token_page_share": page_shares.get(c, 1.0),
                "tokens_per_s": result.tokens_per_s,
                "step_s": result.step.total_s,
                "reason": result.reason,
            }
        )
    return entries


def experiment(
    machine: MachineOptions,
    work: Work,
    simulated: Simulated,
    drives: DriveCount = 1,
    batch_sizes: BatchSizes = "256",
    compression: Annotated[str, typer.Option(help="C of 1/C, with commas")] = "1,2,4,8,16,32",
    recorded_model: RecordedModel = None,
    plot: Picture = None,
) -> Outcome:
    """SparF over its compression (figure 17b); pages touched as recorded, scaled to the paper's at 1/8."""
    check_picture(plot)
    compressions: Sequence[float] = numbers("compression", compression, float)
    setup, batch = work.setup(machine, simulated), number("batch_sizes", batch_sizes)
    with status("recording attention"):
        from vcsd_eval.papers.instinfer.page_shares import recorded_shares, scaled

        touched = recorded_shares(setup, [*compressions, 8.0], recorded_model)
        shares = scaled(setup, touched.by_compression)
    runs = run(simulated, setup, cases(batch, drives, compressions, shares))
    entries = rows(runs, batch, drives, compressions, shares)
    if plot:
        save_figure(lines(entries, "compression", "tokens_per_s", "drives"), plot)
    title = f"SparF, {setup.model.name}, batch {batch}, {drives} drives, pages as {touched.model} touches them"
    outcome = rows_outcome(title, entries, COLUMNS, runs)
    return replace(outcome, result=outcome.result | {"recorded_of": touched.model})
