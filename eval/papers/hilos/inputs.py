"""Uncertain inputs of the predictions: ranges with reasons (`assumed.csv`), and seeded draws from them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

FOLDER, SEED = Path(__file__).parent, 2502
NUMBERS = ("predicted", "low", "high")  # columns of CSV files; all others are text


class Inputs:
    """One draw of every row of `assumed.csv`, which gives names, units and reasons."""

    def __init__(self, **drawn: float) -> None:
        self.__dict__.update(drawn)

    def __getattr__(self, name: str) -> float:
        raise AttributeError(f"assumed.csv has no row {name}: add one with low, high, unit, scale and why")


def rows(name: str) -> list[dict[str, Any]]:
    """Rows of a CSV file of this folder."""
    with (FOLDER / name).open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        return [{key: float(cell) if key in NUMBERS else cell for key, cell in row.items()} for row in reader]


def draw(samples: int) -> list[Inputs]:
    """Latin hypercube: each input takes one value from each of `samples` equally likely parts of its range."""
    random, columns = np.random.default_rng(SEED), {}
    for row in rows("assumed.csv"):
        low, high = row["low"], row["high"]
        part = (random.permutation(samples) + random.random(samples)) / samples
        drawn = low * (high / low) ** part if row["scale"] == "log" else low + (high - low) * part
        columns[row["name"]] = drawn.tolist()
    return [Inputs(**dict(zip(columns, each, strict=True))) for each in zip(*columns.values(), strict=True)]
