"""Picture of a timeline: a row for each track of the host and of the first drive, flash lanes by channel."""

from __future__ import annotations

from pathlib import Path

from vcsd.tracks import Tracks

COLOURS = {
    "layer": "#9aa5b1",
    "Attend": "#616e7c",
    "link": "#d64545",
    "queue": "#f0b429",
    "argtopk": "#8719e0",
    "logit0": "#3e4c59",
    "logit": "#0967d2",
    "attend": "#199473",
    "softmax": "#dd6b20",
    "sense": "#40c3f7",
    "transfer": "#2bb0ed",
    "flash": "#40c3f7",
    "program": "#cb6e17",
    "erase": "#ab091e",
}
"""Colour by the first word of a slice's name, up to an underscore or space."""

SUFFIXES = (".svg", ".png", ".pdf")


def draw(processes: dict[str, Tracks], path: Path) -> None:
    """Draw the host and the first drive."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = [*processes["host"].items(), *processes.get("drive 0", {}).items()]
    rows = [(name, track) for name, track in shown if "lane" not in name]
    figure = Figure(figsize=(11, 0.32 * len(rows) + 1.2), layout="constrained")
    axes, used = figure.subplots(), dict[str, str]()
    for row, (_, track) in enumerate(rows):
        for piece in track:
            word = piece.name.split(",")[0].split(" ")[0]
            kind = word if word in COLOURS else word.split("_")[0]
            used[kind] = COLOURS.get(kind, "#cbd2d9")
            bar = piece.begin_ns / 1e3, (piece.end_ns - piece.begin_ns) / 1e3
            axes.broken_barh([bar], (row - 0.4, 0.8), facecolor=used[kind], edgecolor="white", linewidth=0.2)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("simulated time since the step began, us")
    axes.set_title("A decode step: the host and drive 0", loc="left")
    patches = [Patch(color=colour, label=kind) for kind, colour in used.items()]
    figure.legend(handles=patches, loc="outside right upper", frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
