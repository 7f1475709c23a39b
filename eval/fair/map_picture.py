"""A picture of the map: drives compared with plain SSDs, and the fastest system by batch and context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vcsd_eval.fair.points import BATCHES, CONTEXTS, GB, LINKS, RATES, SYSTEMS, Point, Row, tie_with_ssds
from vcsd_eval.plot import new_figure

LEVELS = (0.25, 0.5, 0.8, 1.25, 2, 4, 8, 16)


def picture(result: Row, point: Point) -> Any:
    """Tokens/s over a plain SSD's with the closed form's tie, and the fastest system by batch and context."""
    from matplotlib.colors import LogNorm

    plane, work = result["plane"], result["work"]
    figure, first = new_figure(width=13, height=5)
    first.remove()
    left, right = figure.subplots(1, 2)
    channels = point.setup.drive.geometry.channels
    flash = [channels * rate for rate in RATES]
    ratios = np.array([row["csd_over_plain_ssd"] or np.nan for row in plane]).reshape(len(RATES), len(LINKS))
    colors = left.contourf(LINKS, flash, ratios, levels=LEVELS, cmap="RdBu", norm=LogNorm(0.1, 10), extend="both")
    bar = figure.colorbar(colors, ax=left, label="tokens/s: computational drive over plain SSD", ticks=LEVELS)
    bar.ax.set_yticklabels([f"{level:g}" for level in LEVELS])
    ties = [tie_with_ssds(point.with_channels(rate)) / GB for rate in RATES]
    left.plot(ties, flash, "k--", label="tie, closed form")
    left.set(xscale="log", yscale="log", xlabel="plain SSD, GB/s", ylabel="flash channels of the drive, GB/s")
    _ticks(left.xaxis, LINKS)
    _ticks(left.yaxis, flash)
    left.legend()
    names = list(SYSTEMS)
    best = np.array([names.index(row["best"]) for row in work]).reshape(len(CONTEXTS), len(BATCHES))
    right.imshow(best, origin="lower", aspect="auto", cmap="Set2", vmin=0, vmax=7)
    for (y, x), system in np.ndenumerate(best):
        row = work[y * len(BATCHES) + x]
        right.text(
            x, y, f"{names[system]}\n{float(f'{row[names[system]]:.3g}'):,g}", ha="center", va="center", fontsize=8
        )
    right.set(xlabel="batch", ylabel="stored tokens of a sequence", title="fastest system, tokens/s")
    right.set_xticks(range(len(BATCHES)), [f"{batch:,}" for batch in BATCHES])
    right.set_yticks(range(len(CONTEXTS)), [f"{context:,}" for context in CONTEXTS])
    right.grid(False)
    return figure


def _ticks(axis: Any, values: Sequence[float]) -> None:
    axis.set_ticks(values, [f"{value:.3g}" for value in values], minor=False)
    axis.set_ticks([], minor=True)
