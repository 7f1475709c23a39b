"""Pictures, with one look."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

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


def as_svg(figure: Any) -> str:
    """A picture as an element of a page."""
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]


def check_format(path: Path) -> None:
    """Raise ValueError for a file that no picture can go to."""
    if path.suffix not in FORMATS:
        raise ValueError(f"{path}: a picture's name ends in {', '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.absolute().parent}")
