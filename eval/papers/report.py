"""All papers' claims and figures on one page: no network, readable on a phone."""

from __future__ import annotations

import html
import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from eval.papers.compare import PAPERS, load
from eval.papers.options import MachineOptions, Simulated
from eval.papers.paper import Evaluation, Paper, Section, judge
from eval.plot import as_svg
from vcsd.progress import err

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1rem; }
div { overflow-x: auto; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 14px; } td, th { border-bottom: 1px solid #ccc; padding: .2rem .6rem; }
td { text-align: right; } td.text, th { text-align: left; } pre { font-size: 13px; overflow-x: auto; }
"""
Part = tuple[str, str]  # title, content


def report(
    machine: MachineOptions,
    simulated: Simulated,
    out: Annotated[Path, typer.Option("--output-dir", help="folder for index.html")] = Path("report"),
) -> None:
    """Papers' claims with our values, and the figures for them, as one page that needs no network."""
    papers = [load(name) for name in PAPERS]
    page = write_report([(paper, paper.evaluate(machine, simulated, True)) for paper in papers], out)
    err.print(f"{page}: {page.stat().st_size / 1e6:.1f} MB")


def write_report(papers: Sequence[tuple[Paper, Evaluation]], folder: Path) -> Path:
    """Write index.html, which is there when it is whole; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    body = "".join(f"<h1>{html.escape(paper.title)}</h1>{_body(_parts(paper, found))}" for paper, found in papers)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    page, part = folder / "index.html", folder / "index.html.part"
    part.write_text(
        f"<!doctype html><html lang='en'><head>{head}<title>vcsd: papers' evaluations</title><style>{_STYLE}</style>"
        f"</head><body>{body}{_body([('Versions', _json(_versions()))])}</body></html>",
        encoding="utf-8",
    )
    return part.replace(page)


def _body(parts: Sequence[Part]) -> str:
    return "".join(
        f"{f'<h2>{html.escape(title)}</h2>' if title else ''}<div>{content}</div>" for title, content in parts
    )


def _parts(paper: Paper, evaluation: Evaluation) -> list[Part]:
    """A paper's claims and figures."""
    judged = judge(paper, evaluation)
    columns = ("id", "text", "paper", "ours", "kind", "error_percent", *evaluation.columns)
    with_reason = [row for row in judged["rows"] if "reason" in row]
    summary = {key: value for key, value in judged.items() if key not in ("rows", "calibrated", "assumed")}
    return [
        ("", f"<p>All times are {evaluation.extent}.</p>"),
        ("Claims", _table(judged["rows"], columns)),
        *([("Values with a reason", _table(with_reason, ("id", "kind", "reason")))] if with_reason else []),
        ("Calibrated constants", _table(judged["calibrated"], ("name", "value", "unit", "fixed_by", "why"))),
        ("Assumed constants", _table(judged["assumed"], ("name", "value", "unit", "why"))),
        ("Summary", _json(summary)),
        *((section.title, _content(section)) for section in evaluation.sections),
    ]


def _content(section: Section) -> str:
    if section.picture is not None:
        return as_svg(section.picture)
    return _table(section.rows, section.columns) if section.value is None else _json(section.value)


def _versions() -> dict[str, str]:
    packages = ("vcsd", "numpy", "numba", "torch", "transformers")
    return {name: version(name) for name in packages} | {"python": platform.python_version()}


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    def cell(value: Any) -> str:
        if isinstance(value, str):
            return f'<td class="text">{html.escape(value)}</td>'
        return f"<td>{'-' if value is None else f'{value:,.4g}'}</td>"

    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    lines = "".join("<tr>" + "".join(cell(row[column]) for column in columns) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{lines}</table>"


def _json(values: Mapping[str, Any]) -> str:
    return f"<pre>{html.escape(json.dumps(values, indent=1))}</pre>"
