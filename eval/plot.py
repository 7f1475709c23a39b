"""Pictures, with one look."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from csd_spec.optional import require

Rows = Sequence[dict[str, Any]]
FORMATS = (".png", ".svg", ".pdf")


def new_figure(width: float = 7, height: float = 4.5) -> tuple[Any, Any]:
    """A figure and its axes."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    maps: Any = colormaps
    axes.set_prop_cycle(color=[*maps["Dark2"].colors, *maps["tab20"].colors[::2]])
    axes.grid(True, which="both", linewidth=0.3)
    return figure, axes


def save_figure(figure: Any, path: Path) -> None:
    """Write a picture in the format that the file's name says."""
    check_format(path)
    figure.savefig(path, dpi=150)


def check_format(path: Path) -> None:
    """Raise ValueError for a file that no picture can go to, or if nothing can draw one."""
    require(f"a picture ({path})", "plot", "matplotlib")
    if path.suffix not in FORMATS:
        raise ValueError(f"{path}: a picture's name ends in {', '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.absolute().parent}")


def lines(rows: Rows, x: str, y: str, series: str) -> Any:
    """A figure of y over x, a line for each value of `series`."""
    figure, axes = new_figure()
    for name in dict.fromkeys(row[series] for row in rows):
        points = [(row[x], row[y]) for row in rows if row[series] == name and row[y] is not None]
        axes.plot(*zip(*points, strict=True), "o-", label=str(name), markersize=4) if points else None
    axes.set(xlabel=x, ylabel=y, ylim=(0, None))
    if all(isinstance(row[x], int | float) for row in rows):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({row[x] for row in rows}), [f"{value:g}" for value in sorted({row[x] for row in rows})])
    axes.legend(fontsize=7)
    return figure


def stack(rows: Rows, label: str, parts: Sequence[str]) -> Any:
    """A figure with a bar for each row, of shares that add up."""
    figure, axes = new_figure()
    names = [f"{row[label]}\n{row['batch']}" for row in rows if row[parts[0]] is not None]
    bottom = np.zeros(len(names))
    for part in parts:
        values = np.array([row[part] for row in rows if row[part] is not None])
        axes.bar(range(len(names)), values, bottom=bottom, label=part)
        bottom += values
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=6)
    axes.legend(fontsize=7)
    return figure
