"""All papers' claims and charts on one page that needs no network: a summary, each paper, how to reproduce it."""

from __future__ import annotations

import html
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from csd_spec.optional import require
from vcsd.progress import Tick, note, progress_to, status
from vcsd_eval.papers.charts import chart_element, chart_scripts
from vcsd_eval.papers.claims import COMPUTED, MAX_PERCENT, MAX_POINTS, ClaimKind
from vcsd_eval.papers.compare import PAPERS, load
from vcsd_eval.papers.instinfer.runs import WORKER_BYTES, default_workers
from vcsd_eval.papers.options import MachineOptions, Simulated
from vcsd_eval.papers.page import PagePart, label, table, values_table, whole_page
from vcsd_eval.papers.paper import FOLLOWS, Evaluation, Paper, Section, judge
from vcsd_eval.sweep import sweep

TITLE = "Papers' results compared with vcsd's model"
PAPER_BYTES = 2 << 30  # memory of a paper's process: recording attention for InstInfer takes 1.2 GB
CLOSE_PERCENT = 10.0  # error of claims that the summary counts
SUMMARY = {
    "paper": "paper",
    "compared": "claims compared",
    "within": f"within {CLOSE_PERCENT:g} %",
    "median": "median error, %",
    "worst": "worst error, %",
    "worst_claim": "claim with the worst error",
    "contradicted": "contradicted",
    "undetermined": "not determined",
    "printed": "printed values",
}
COUNTS = ("printed", "compared", "within", "contradicted", "undetermined")  # columns of numbers of claims
CLAIM = {"id": "id", "error_percent": "error, %", "paper": "paper", "ours": "ours", "unit": "unit", "kind": "kind"}
CLAIM_TEXT = {"source": "source", "what": "quantity", "page": "printed in"}
REASON = {"id": "claims", "kind": "kind", "reason": "reason"}
ASSUMED = {"name": "name", "value": "value", "unit": "unit", "why": "why"}
CALIBRATED = {"name": "name", "value": "value", "unit": "unit", "fixed_by": "fixed by", "why": "why"}
REPRODUCE = {"command": "command", "minutes": "minutes", "tolerance": "tolerance", "shows": "claims or section"}
SEPARATE = ("rows", "calibrated", "assumed", "exceptions")  # entries of `judge` with tables of their own


@dataclass(frozen=True, slots=True)
class PaperResult:
    """A paper, its evaluation, and how long that took: wall-clock time, seconds."""

    paper: Paper
    evaluation: Evaluation
    evaluation_s: float


def report(
    machine: MachineOptions,
    simulated: Simulated,
    out: Annotated[Path, typer.Option("--output-dir", help="folder for index.html")] = Path("report"),
) -> None:
    """Papers' claims with our values, and the charts for them, as one page that needs no network."""
    require("vcsd report", "plot", "plotly")
    machine.check()
    out.mkdir(parents=True, exist_ok=True)  # an error before the evaluation
    page = write_report(evaluate_papers(machine, simulated), out)
    note(f"{page}: {page.stat().st_size / 1e6:.1f} MB")


@dataclass(frozen=True, slots=True)
class _PaperJob:
    """A paper's name, and the arguments of its evaluation."""

    name: str
    machine: MachineOptions
    simulated: Simulated


def evaluate_papers(machine: MachineOptions, simulated: Simulated) -> list[PaperResult]:
    """Evaluate all papers with their figures, in processes if there are several workers; show the progress of each."""
    workers = simulated.workers or default_workers(WORKER_BYTES if simulated.all_layers else PAPER_BYTES)
    own = replace(simulated, workers=max(1, workers - len(PAPERS) + 1))  # workers that are left are those of one paper
    jobs = [_PaperJob(name, machine, own) for name in PAPERS]
    running: dict[str, str] = {}
    ended: list[int] = []

    def tick(part: Any) -> None:
        running[part[0]] = part[1]

    def done(number: int, _: object) -> None:
        running.pop(jobs[number].name, None)
        ended.append(number)

    def text() -> str:
        parts = [f"{name}: {part}" if part else name for name, part in running.copy().items()]
        return "; ".join([f"papers: {len(ended)} of {len(jobs)}", *parts])

    with status(text):
        answers = sweep(_evaluated, jobs, workers, tick, done)
    return [PaperResult(load(job.name), *answer) for job, answer in zip(jobs, answers, strict=True)]


def _evaluated(job: _PaperJob, tick: Tick) -> tuple[Evaluation, float]:
    """A paper's evaluation and its duration in seconds. Texts of its progress are ticks, with its name."""
    start_s = time.perf_counter()
    tick((job.name, ""))
    with progress_to(lambda text: tick((job.name, text))):
        evaluation = load(job.name).evaluate(job.machine, job.simulated, True)
    return evaluation, time.perf_counter() - start_s


def write_report(results: Sequence[PaperResult], folder: Path) -> Path:
    """Write index.html, which is there when it is whole; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    charts = [section.chart for result in results for section in result.evaluation.sections if section.chart]
    introduction = f'<p class="quiet">{date.today().isoformat()}, vcsd {version("vcsd")}</p>'
    parts = [
        _summary(results),
        *(PagePart(result.paper.title, _extent(result), _paper_parts(result)) for result in results),
        _reproduce(results),
        PagePart("Versions", values_table(_versions())),
    ]
    page, part = folder / "index.html", folder / "index.html.part"
    part.write_text(whole_page(TITLE, introduction, parts, chart_scripts(charts)), encoding="utf-8")
    return part.replace(page)


def summary_row(result: PaperResult) -> dict[str, Any]:
    """Counts and errors of a paper's claims, by column of SUMMARY; errors in percent."""
    judged = judge(result.paper, result.evaluation)
    errors = [abs(row["error_percent"]) for row in judged["rows"] if row["kind"] in FOLLOWS]
    (worst,) = (claim for claim in result.paper.claims if claim.id == judged["worst_row"])
    return {
        "paper": result.paper.title,
        "compared": judged["predicted_rows"],
        "within": sum(error <= CLOSE_PERCENT for error in errors),
        "median": judged["median_error_percent"],
        "worst": judged["worst_error_percent"],
        "worst_claim": f"{worst.id}: {worst.what}",
        "contradicted": judged["counts"][ClaimKind.CONTRADICTS],
        "undetermined": judged["counts"][ClaimKind.UNDETERMINED],
        "printed": len(judged["rows"]),
    }


def _summary(results: Sequence[PaperResult]) -> PagePart:
    rows = [summary_row(result) for result in results]
    total = {name: sum(row[name] for row in rows) for name in SUMMARY if name in COUNTS}
    papers = "One paper prints" if len(rows) == 1 else f"{len(rows)} papers print"
    within_percent = 100 * total["within"] / total["compared"]
    said = (
        f"{papers} {total['printed']} values. Our model computes {total['compared']} of them without being fitted to "
        f"them: {total['within']} ({within_percent:.0f} %) differ by at most {CLOSE_PERCENT:g} % "
        f"from the printed value. {total['contradicted']} values contradict others of the same paper, and "
        f"{total['undetermined']} depend on numbers that the paper does not print."
    )
    shown = table(rows, SUMMARY, {"median": ".1f", "worst": ".1f"}, "pinned")
    return PagePart("Summary", f"<p>{said}</p>{shown}")


def _extent(result: PaperResult) -> str:
    return f"<p>All times are {html.escape(result.evaluation.extent)}.</p>"


def _paper_parts(result: PaperResult) -> list[PagePart]:
    """A paper's claims, constants and sections."""
    paper, evaluation = result.paper, result.evaluation
    judged = judge(paper, evaluation)
    reasons = _reasons(judged)
    further = {name: value for name, value in judged.items() if name not in SEPARATE}
    return [
        PagePart("Claims", _claims(paper, evaluation, judged["rows"])),
        *([PagePart("Reasons", table(reasons, REASON))] if reasons else []),
        PagePart("Calibrated constants", _constants(judged["calibrated"], CALIBRATED)),
        PagePart("Assumed constants", _constants(judged["assumed"], ASSUMED)),
        *_sections(evaluation.sections),
        PagePart("Errors and further values", values_table(further)),
    ]


def _reasons(judged: dict[str, Any]) -> list[dict[str, str]]:
    """Reasons of values that have no error, contradict others or are beyond the tolerance, with their claims."""
    kinds = {row["id"]: row["kind"] for row in judged["rows"]}
    claims_by_reason: dict[tuple[str, str], list[str]] = {}
    for claim in (*(row for row in judged["rows"] if "reason" in row), *judged["exceptions"]):
        claims_by_reason.setdefault((kinds[claim["id"]], claim["reason"]), []).append(claim["id"])
    return [{"id": ", ".join(ids), "kind": kind, "reason": reason} for (kind, reason), ids in claims_by_reason.items()]


def _claims(paper: Paper, evaluation: Evaluation, rows: Sequence[dict[str, Any]]) -> str:
    shown = [
        {
            **row,
            "unit": claim.unit,
            "what": claim.what,
        }
        for claim, row in zip(paper.claims, rows, strict=True)
    ]
    further = {name: label(name) for name in evaluation.columns}
    return table(shown, {**CLAIM, **further, **CLAIM_TEXT}, {"error_percent": "+.1f"}, "pinned")


def _constants(rows: Sequence[dict[str, Any]], columns: dict[str, str]) -> str:
    return table(rows, columns) if rows else "<p>None.</p>"


def _sections(sections: Sequence[Section]) -> list[PagePart]:
    """Parts of the page; a section without a title belongs to the part before it."""
    parts: list[PagePart] = []
    for section in sections:
        if section.title or not parts:
            parts.append(PagePart(section.title or "Values", _content(section)))
        else:
            parts[-1] = PagePart(parts[-1].title, parts[-1].content + _content(section))
    return parts


def _content(section: Section) -> str:
    if section.chart is not None:
        return chart_element(section.chart, section.title)
    if section.value is not None:
        return values_table(section.value)
    return table(section.rows, {name: label(name) for name in section.columns})


def _reproduce(results: Sequence[PaperResult]) -> PagePart:
    """Commands that print the page's values."""
    said = (
        "Minutes are the wall-clock time of the paper's whole evaluation when this page was made; a command that "
        "prints a part of it takes less, and the first run also compiles kernels. Tolerance is the largest error "
        "that the model explains: claims beyond it are among the reasons. Calibrated and contradicting values "
        "have none."
    )
    parts = [
        PagePart(result.paper.title, table(reproduction_rows(result), REPRODUCE, {"minutes": ".1f"}, "commands"))
        for result in results
    ]
    return PagePart("Reproduce", f"<p>{said}</p>", parts)


def reproduction_rows(result: PaperResult) -> list[dict[str, Any]]:
    """Commands of a paper's computed claims and sections, by column of REPRODUCE."""
    shows: dict[tuple[str, str], list[str]] = {}
    for claim, row in zip(result.paper.claims, judge(result.paper, result.evaluation)["rows"], strict=True):
        if claim.kind in COMPUTED:
            limit = f"{MAX_POINTS:g} points" if claim.unit == "%" else f"{MAX_PERCENT:g} %"
            tolerance = limit if claim.kind in FOLLOWS else "-"
            shows.setdefault((row["command"], tolerance), []).append(claim.id)
    for section in result.evaluation.sections:
        if section.command:
            shows.setdefault((section.command, "-"), []).append(section.title)
    minutes = result.evaluation_s / 60
    return [
        {"command": command, "minutes": minutes, "tolerance": tolerance, "shows": ", ".join(names)}
        for (command, tolerance), names in shows.items()
    ]


def _versions() -> dict[str, str]:
    from plotly.offline import get_plotlyjs_version

    packages = ("vcsd", "numpy", "numba", "torch", "transformers", "plotly")
    versions = {name: version(name) for name in packages}
    return versions | {"plotly.js": get_plotlyjs_version(), "python": platform.python_version()}
