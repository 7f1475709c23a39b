"""`vcsd eval claims --paper hilos`: predictions with intervals, equal to those that `predictions.csv` froze."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from vcsd.tables import table
from vcsd_eval.experiment import Outcome
from vcsd_eval.papers.hilos.inputs import FOLDER, NUMBERS, draw, rows
from vcsd_eval.papers.hilos.items import values
from vcsd_eval.papers.options import MachineOptions

SAMPLES, FROZEN = 400, FOLDER / "predictions.csv"


def intervals() -> dict[str, tuple[float, ...]]:
    """Median, 5th and 95th percentile of each quantity by id, to four digits."""
    drawn = [values(each) for each in draw(SAMPLES)]
    columns = {name: [each[name] for each in drawn] for name in drawn[0]}
    return {
        name: tuple(float(f"{each:.4g}") for each in np.percentile(column, (50, 5, 95), method="inverted_cdf"))
        for name, column in columns.items()
    }


def predictions(found: dict[str, tuple[float, ...]]) -> list[dict[str, Any]]:
    """Rows of `predictions.csv` with numbers.

    Raises:
        ValueError: The model gives other values than the file.
    """
    frozen = rows(FROZEN.name)
    known = {row["id"]: tuple(row[name] for name in NUMBERS) for row in frozen}
    for name in sorted(known | found):
        if known.get(name) != found.get(name):
            reason = f"{name} is {known.get(name)}, the model gives {found.get(name)}: predictions are frozen"
            raise ValueError(f"{FROZEN.name}: {reason}, undo the change of the model or of assumed.csv")
    return frozen


def predict(machine: MachineOptions) -> Outcome:
    """Predictions, items without one, and assumptions."""
    if machine != MachineOptions():
        raise ValueError("--model, --gpu, --host: hilos is predicted for its own machine: leave these options out")
    found, without, assumed = predictions(intervals()), rows("not_predicted.csv"), rows("assumed.csv")
    pages, sha256 = {row["page"] for row in found}, hashlib.sha256(FROZEN.read_bytes()).hexdigest()
    result = {
        "paper": "hilos",
        "predictions": found,
        "not_predicted": without,
        "assumed": assumed,
        "sha256": sha256,
        "predicted_items": len(pages),
        "listed_items": len(pages | {row["page"] for row in without}),
    }
    counts = f"{len(pages)} of {result['listed_items']} items have predictions; no printed value has been compared"
    shown = [
        _table("Predictions of HILOS, 90 % intervals", found, "how"),
        _table("Not predicted", without),
        _table("Assumed ranges", assumed, "scale"),
    ]
    return Outcome(result, [*shown, f"{counts}; SHA-256 of {FROZEN.name}: {sha256}"])


def _table(title: str, found: list[dict[str, Any]], hidden: str = "") -> Any:
    names = [name for name in found[0] if name != hidden]
    cells = [[f"{row[name]:g}" if isinstance(row[name], float) else row[name] for name in names] for row in found]
    return table(title, names, cells, left=[name for name in names if name not in NUMBERS])
