"""The claims and the figures of one drive, scaling and sensitivity on one page: no network, readable on a phone."""

from __future__ import annotations

import html
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from eval.papers.instinfer import breakdown, claims, engine_breakdown, scaling, sensitivity, throughput
from eval.papers.instinfer.options import Machine, Simulated, extent
from eval.papers.instinfer.systems import Setup
from eval.plot import as_svg, lines, stack
from vcsd.progress import err, status

BATCHES, BROKEN_DOWN = (4, 16, 32, 64, 128, 256), (4, 64, 256)
COUNTS, COMPRESSIONS = (1, 2, 4, 8, 20), (1, 2, 4, 8, 16, 32)
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1rem; }
div { overflow-x: auto; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 14px; } td, th { border-bottom: 1px solid #ccc; padding: .2rem .6rem; }
td { text-align: right; } td.text, th { text-align: left; } pre { font-size: 13px; overflow-x: auto; }
"""
Section = tuple[str, str]  # title, content


def report(
    machine: Machine,
    simulated: Simulated,
    out: Annotated[Path, typer.Option(help="folder for index.html")] = Path("report"),
) -> None:
    """The claims and the figures of one drive, scaling and sensitivity, as one page that needs no network."""
    page = write_report(machine.setup(simulated), simulated, out)
    err.print(f"{page}: {page.stat().st_size / 1e6:.1f} MB")


def write_report(setup: Setup, simulated: Simulated, folder: Path) -> Path:
    """Work everything out and write index.html, which is there when it is whole; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    sections = _sections(setup, simulated)
    headings = [f"<h2>{html.escape(title)}</h2>" if title else "" for title, _ in sections]
    body = "".join(f"{head}<div>{content}</div>" for head, (_, content) in zip(headings, sections, strict=True))
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    title = f"vcsd: InstInfer's evaluation, {html.escape(setup.model.name)}"
    page, part = folder / "index.html", folder / "index.html.part"
    part.write_text(
        f"<!doctype html><html lang='en'><head>{head}<title>{title}</title><style>{_STYLE}</style></head>"
        f"<body><h1>{title}</h1>{body}</body></html>",
        encoding="utf-8",
    )
    return part.replace(page)


def _sections(setup: Setup, simulated: Simulated) -> list[Section]:
    with status("recording attention"):
        from eval.papers.instinfer.page_shares import recorded_shares, scaled

        touched = recorded_shares(setup, [*COMPRESSIONS, 8.0])
    recorded, shares = touched[8.0], scaled(setup, touched)
    runs = simulated.run(
        setup,
        [
            *claims.cases(recorded),
            *throughput.cases(BATCHES, 1),
            *breakdown.cases(BROKEN_DOWN, 1),
            *engine_breakdown.cases(64, 1),
            *scaling.cases(256, COUNTS),
            *sensitivity.cases(256, 1, COMPRESSIONS, shares),
        ],
    )
    claimed = claims.evaluate_claims(runs, recorded)
    rates = throughput.rows(runs, BATCHES, 1)
    steps = breakdown.rows(runs, BROKEN_DOWN, 1)
    units = [row for row in engine_breakdown.rows(runs, 64, 1) if row["s"]]
    by_count = scaling.rows(runs, 256, COUNTS)
    sensitive = sensitivity.rows(runs, 256, 1, COMPRESSIONS, shares)
    columns = ("id", "text", "paper", "ours", "kind", "error_percent", "ours_overlapped", "held_out")
    summary = {key: value for key, value in claimed.items() if key not in ("rows", "calibrated")}
    return [
        ("", f"<p>All times are {extent(runs)}.</p>"),
        ("Claims", _table(claimed["rows"], columns)),
        ("Calibrated constants", _table(claimed["calibrated"], ("name", "value", "unit", "fixed_by", "why"))),
        ("Summary", _json(summary)),
        ("Throughput, 1 drive", as_svg(lines(rates, "batch", "tokens_per_s", "system"))),
        ("", _table(rates, ("system", "batch", "tokens_per_s", "step_s", "reason"))),
        ("Decode step", as_svg(stack(steps, "system", breakdown.SHARES))),
        ("A drive's units, batch 64", _table(units, ("system", "unit", "s", "share"))),
        ("Scaling, batch 256", as_svg(lines(by_count, "drives", "speedup", "system"))),
        ("", _table(by_count, ("system", "drives", "tokens_per_s", "speedup"))),
        ("Sensitivity, batch 256", as_svg(lines(sensitive, "compression", "tokens_per_s", "drives"))),
        ("Configuration", _json(asdict(setup))),
        ("Versions", _json(_versions())),
    ]


def _versions() -> dict[str, str]:
    packages = ("vcsd", "numpy", "numba", "torch", "transformers")
    return {name: version(name) for name in packages} | {"python": platform.python_version()}


def _table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    def cell(value: Any) -> str:
        if isinstance(value, str):
            return f'<td class="text">{html.escape(value)}</td>'
        return f"<td>{'-' if value is None else f'{value:,.4g}'}</td>"

    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    lines = "".join("<tr>" + "".join(cell(row[column]) for column in columns) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{lines}</table>"


def _json(values: dict[str, Any]) -> str:
    return f"<pre>{html.escape(json.dumps(values, indent=1))}</pre>"
