"""All papers: printed values compared with our model's, calibrated constants, and errors of predicted values."""

from __future__ import annotations

import importlib
from enum import StrEnum
from typing import Annotated, Any

import typer

from vcsd.progress import progress
from vcsd.tables import table
from vcsd_eval.experiment import Outcome
from vcsd_eval.papers.leave_one_out import leave_one_out as leave_one_out_of
from vcsd_eval.papers.leave_one_out import ticks
from vcsd_eval.papers.options import MachineOptions, Simulated, cell
from vcsd_eval.papers.paper import Evaluation, Paper, judge

PAPERS = {  # modules with a `PAPER`, imported when it is requested
    "instinfer": "vcsd_eval.papers.instinfer.evaluate",
    "dual-blade": "vcsd_eval.papers.dual_blade.evaluate",
    "tierkv": "vcsd_eval.papers.tierkv.evaluate",
    "orbitflow": "vcsd_eval.papers.orbitflow.evaluate",
    "tutti": "vcsd_eval.papers.tutti.evaluate",
}
PREDICTED = {"hilos": "vcsd_eval.papers.hilos.predict"}  # modules with `predict`: papers whose results were not read
ALL = "all"
Name = StrEnum("Name", [(name, name) for name in (*PAPERS, *PREDICTED, ALL)])  # type: ignore[misc]


def load(name: str) -> Paper:
    """A paper of the table."""
    paper: Paper = importlib.import_module(PAPERS[name]).PAPER
    return paper


def experiment(
    machine: MachineOptions,
    simulated: Simulated,
    paper: Annotated[Name, typer.Option(help="paper whose claims are compared")] = Name("instinfer"),
    leave_one_out: Annotated[
        bool, typer.Option("--leave-one-out", help="also predict each claim from constants fitted to the others")
    ] = False,
) -> Outcome:
    """Compare papers' printed values with our model, by kind: calibrated, derived, predicted, contradicting, ..."""
    if leave_one_out and paper in PREDICTED:
        raise ValueError(f"--leave-one-out: nothing of {paper} is fitted: choose one of {', '.join(PAPERS)}")
    if leave_one_out and machine != MachineOptions():
        raise ValueError("--leave-one-out: fits to each paper's machine: leave --model, --gpu and --host out")
    results: dict[str, Any] = {}
    shown: list[Any] = []
    for name in [*PAPERS, *PREDICTED] if paper == ALL else [str(paper)]:
        if name in PREDICTED:
            outcome = importlib.import_module(PREDICTED[name]).predict(MachineOptions() if paper == ALL else machine)
            results[name], shown = outcome.result, [*shown, *outcome.shown]
            continue
        each = load(name)
        evaluation = each.evaluate(machine, simulated, False)
        results[name] = judge(each, evaluation)
        shown += _shown(each, evaluation, results[name])
        if leave_one_out:
            results[name]["leave_one_out"] = left_out = _left_out(each, PAPERS[name])
            shown.append(_left_out_line(left_out))
    return Outcome(results if paper == ALL else results[str(paper)], shown)


def _shown(paper: Paper, evaluation: Evaluation, result: dict[str, Any]) -> list[Any]:
    """Tables and lines for the terminal."""
    columns = ("id", "text", "paper", "ours", "kind", "error %", *evaluation.columns)
    rows = [
        (
            row["id"],
            row["text"],
            cell(float(row["paper"])),
            cell(row["ours"]),
            row["kind"],
            "-" if row["error_percent"] is None else f"{row['error_percent']:+.1f}",
            *(cell(row[column]) for column in evaluation.columns),
        )
        for row in result["rows"]
    ]
    names = ("name", "value", "unit", "why")
    return [
        table(f"Claims of {paper.title} ({evaluation.extent})", columns, rows, left=("id", "text", "kind")),
        _constants("Calibrated", result["calibrated"], (*names, "fixed_by")),
        _constants("Assumed", result["assumed"], names),
        *(f"{kind} {', '.join(ids)}: {reason}" for (kind, reason), ids in _reasons(result["rows"]).items()),
        *(f"exception {exception['id']}: {exception['reason']}" for exception in result["exceptions"]),
        _errors(result),
        _by_source(result["by_source"]),
        *evaluation.notes,
    ]


def _errors(result: dict[str, Any]) -> str:
    """Errors of the rows that follow from the model in a line, the worst by its name."""
    (worst,) = (row for row in result["rows"] if row["id"] == result["worst_row"])
    said = (
        f"{result['predicted_rows']} rows follow from the model: median error {result['median_error_percent']:.1f} %, "
        f"{result['rows_beyond_15_percent']} beyond 15 %, worst {result['worst_error_percent']:.1f} % "
        f"({worst['id']}: {worst['text']})"
    )
    if result["independent_rows"]:
        said += (
            f"; {result['independent_rows']} independent ones (predicted, not derived, no bounds), beside "
            f"{result['dof']} constants: median error {result['independent_median_error_percent']:.1f} %"
        )
    return said


def _left_out(paper: Paper, module: str) -> dict[str, Any]:
    with progress(f"{paper.title} with other constants", ticks(paper)) as tick:
        return leave_one_out_of(paper, module, tick)


def _left_out_line(left_out: dict[str, Any]) -> str:
    """Leave-one-out errors in a line."""
    if not left_out["rows"]:
        return "left out of the fit: no row is fixed by the others"
    said = (
        f"left out of the fit in turn, {len(left_out['rows'])} rows: "
        f"median error {left_out['median_error_percent']:.1f} %, "
        f"worst {left_out['worst_error_percent']:.1f} % ({left_out['worst_row']})"
    )
    alone = left_out["undetermined"]
    return said + (f"; {', '.join(alone)} alone fix a constant" if alone else "")


def _by_source(sources: dict[str, dict[str, Any]]) -> str:
    """Errors of the predicted rows by how our value is obtained, in a line."""
    return "by source: " + "; ".join(
        f"{name} {source['rows']} rows, median {source['median_error_percent']:.1f} %, "
        f"worst {source['worst_error_percent']:.1f} %"
        for name, source in sources.items()
        if source["rows"]
    )


def _reasons(rows: list[dict[str, Any]]) -> dict[tuple[str, str], list[str]]:
    """Ids of values with a reason, by kind and reason."""
    claims_by_reason: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if "reason" in row:
            claims_by_reason.setdefault((row["kind"], row["reason"]), []).append(row["id"])
    return claims_by_reason


def _constants(title: str, constants: list[dict[str, Any]], columns: tuple[str, ...]) -> Any:
    rows = [
        [f"{constant[name]:g}" if name == "value" else constant[name] for name in columns] for constant in constants
    ]
    return table(title, columns, rows, left=columns)
