"""The claims and the figures of one drive, scaling and sensitivity on one page: no network, readable on a phone."""

from __future__ import annotations

import html
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from eval.paper import figures
from eval.paper.claims import PLACES, evaluate_claims
from eval.paper.systems import POINTS, Setup
from eval.plot import as_svg

BATCHES, COUNTS, COMPRESSIONS = (4, 16, 32, 64, 128, 256), (1, 2, 4, 8, 20), (1, 2, 4, 8, 16, 32)
STEPS = POINTS * (5 * len(PLACES) + 4 + 3 * len(BATCHES) + 3 * 3 + 4 * len(COUNTS) + len(COMPRESSIONS) + 3)
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1rem; }
div { overflow-x: auto; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 14px; } td, th { border-bottom: 1px solid #ccc; padding: .2rem .6rem; }
td { text-align: right; } td.text, th { text-align: left; } pre { font-size: 13px; overflow-x: auto; }
"""


def write_report(setup: Setup, folder: Path, tick: Callable[[object], None] | None = None) -> Path:
    """Work everything out and write index.html; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    claims = evaluate_claims(setup, figures.recorded_shares(setup, [8.0])[8.0], tick)
    throughput = figures.throughput(setup, BATCHES, 1, tick)
    breakdown = figures.breakdown(setup, (4, 64, 256), 1, tick)
    engine = figures.engine_breakdown(setup, 64, 1, tick)
    scaling = figures.scaling(setup, 256, COUNTS, tick)
    shares = figures.scaled_shares(setup, COMPRESSIONS)
    sensitivity = figures.sensitivity(setup, 256, 1, COMPRESSIONS, shares, tick)
    one = [row for row in engine if row["s"]]
    parts = ("kv_share", "engine_share", "other_share")
    page = folder / "index.html"
    columns = ("id", "text", "paper", "ours", "kind", "error_percent", "ours_overlapped", "held_out")
    sections = [
        ("Claims", _table(claims["rows"], columns)),
        ("Calibrated constants", _table(claims["calibrated"], ("name", "value", "unit", "fixed_by", "why"))),
        ("Summary", _json({key: value for key, value in claims.items() if key not in ("rows", "calibrated")})),
        ("Throughput, 1 drive", as_svg(figures.lines(throughput, "batch", "tokens_per_s", "system"))),
        ("", _table(throughput, ("system", "batch", "tokens_per_s", "step_s", "reason"))),
        ("Decode step", as_svg(figures.stack(breakdown, "system", parts))),
        ("A drive's units, batch 64", _table(one, ("system", "unit", "s", "share"))),
        ("Scaling, batch 256", as_svg(figures.lines(scaling, "drives", "speedup", "system"))),
        ("", _table(scaling, ("system", "drives", "tokens_per_s", "speedup"))),
        ("Sensitivity, batch 256", as_svg(figures.lines(sensitivity, "compression", "tokens_per_s", "drives"))),
        ("Configuration", _json(asdict(setup))),
        (
            "Versions",
            _json(
                {name: version(name) for name in ("vcsd", "numpy", "numba", "torch", "transformers")}
                | {"python": platform.python_version()}
            ),
        ),
    ]
    headings = [f"<h2>{html.escape(title)}</h2>" if title else "" for title, _ in sections]
    body = "".join(f"{head}<div>{content}</div>" for head, (_, content) in zip(headings, sections, strict=True))
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    title = f"vcsd: InstInfer's evaluation, {html.escape(setup.model.name)}"
    page.write_text(
        f"<!doctype html><html lang='en'><head>{head}<title>{title}</title><style>{_STYLE}</style></head>"
        f"<body><h1>{title}</h1><p>All times are modelled.</p>{body}</body></html>",
        encoding="utf-8",
    )
    return page


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
