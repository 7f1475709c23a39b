"""`vcsd eval claims --paper hilos`: predictions with intervals, equal to those that `predictions.csv` froze."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from csd_spec.arrays import F64
from vcsd.tables import table
from vcsd_eval.experiment import Outcome
from vcsd_eval.papers.hilos.inputs import FOLDER, NUMBERS, Inputs, draw, rows
from vcsd_eval.papers.hilos.items import values
from vcsd_eval.papers.options import MachineOptions

SAMPLES, FROZEN = 400, FOLDER / "predictions.csv"


def drawn_values(draws: list[Inputs]) -> dict[str, list[float]]:
    """Each quantity by id, at all draws."""
    drawn = [values(sample) for sample in draws]
    return {name: [sample[name] for sample in drawn] for name in drawn[0]}


def intervals(columns: dict[str, list[float]]) -> dict[str, tuple[float, ...]]:
    """Median, 5th and 95th percentile of each quantity by id, to four digits."""
    return {
        name: tuple(float(f"{bound:.4g}") for bound in np.percentile(column, (50, 5, 95), method="inverted_cdf"))
        for name, column in columns.items()
    }


def strongest_inputs(draws: list[Inputs], columns: dict[str, list[float]]) -> dict[str, dict[str, Any] | None]:
    """Input with the largest rank correlation (Spearman) by id of a quantity; None for a constant quantity."""
    inputs = {name: _ranks([vars(each)[name] for each in draws]) for name in vars(draws[0])}
    strongest: dict[str, dict[str, Any] | None] = {}
    for key, column in columns.items():
        ranks = _ranks([float(f"{each:.9g}") for each in column])  # values that differ by rounding are equal
        if not ranks.std():
            strongest[key] = None
            continue
        correlations = {name: float(np.corrcoef(ranks, each)[0, 1]) for name, each in inputs.items()}
        name = max(correlations, key=lambda correlation: abs(correlations[correlation]))
        strongest[key] = {"input": name, "rank_correlation": correlations[name]}
    return strongest


def _ranks(column: list[float]) -> F64:
    """Ranks from 1, equal values share their mean."""
    _, inverse, counts = np.unique(column, return_inverse=True, return_counts=True)
    ranks: F64 = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return ranks


def predictions(intervals_now: dict[str, tuple[float, ...]]) -> list[dict[str, Any]]:
    """Rows of `predictions.csv` with numbers.

    Raises:
        ValueError: The model gives other values than the file.
    """
    frozen = rows(FROZEN.name)
    before = {row["id"]: tuple(row[name] for name in NUMBERS) for row in frozen}
    for name in sorted(before | intervals_now):
        if before.get(name) != intervals_now.get(name):
            reason = f"{name} is {before.get(name)}, the model gives {intervals_now.get(name)}: predictions are frozen"
            raise ValueError(f"{FROZEN.name}: {reason}, undo the change of the model or of assumed.csv")
    return frozen


def predict(machine: MachineOptions) -> Outcome:
    """Predictions, items without one, and assumptions."""
    if machine != MachineOptions():
        raise ValueError("--model, --gpu, --host: hilos is predicted for its own machine: leave these options out")
    draws = draw(SAMPLES)
    columns = drawn_values(draws)
    claims, without, assumed = predictions(intervals(columns)), rows("not_predicted.csv"), rows("assumed.csv")
    pages, sha256 = {row["page"] for row in claims}, hashlib.sha256(FROZEN.read_bytes()).hexdigest()
    result = {
        "paper": "hilos",
        "predictions": claims,
        "not_predicted": without,
        "assumed": assumed,
        "strongest_inputs": strongest_inputs(draws, columns),
        "sha256": sha256,
        "predicted_items": len(pages),
        "listed_items": len(pages | {row["page"] for row in without}),
    }
    counts = f"{len(pages)} of {result['listed_items']} items have predictions; no printed value has been compared"
    shown = [
        _table("Predictions of HILOS, 90 % intervals", claims, "how"),
        _table("Not predicted", without),
        _table("Assumed ranges", assumed, "scale"),
    ]
    return Outcome(result, [*shown, f"{counts}; SHA-256 of {FROZEN.name}: {sha256}"])


def _table(title: str, claims: list[dict[str, Any]], hidden: str = "") -> Any:
    names = [name for name in claims[0] if name != hidden]
    cells = [[f"{row[name]:g}" if isinstance(row[name], float) else row[name] for name in names] for row in claims]
    return table(title, names, cells, left=[name for name in names if name not in NUMBERS])
