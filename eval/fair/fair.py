"""Every headline compared like with like: schedule, output error, hardware and service equal in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from vcsd.loading import CHECKPOINT
from vcsd.options import check_model
from vcsd.progress import Tick, progress
from vcsd.tables import table
from vcsd_eval.accuracy import texts
from vcsd_eval.accuracy.data import find
from vcsd_eval.experiment import Outcome
from vcsd_eval.fair import dual_blade, instinfer, orbitflow, recorded, tierkv, tutti
from vcsd_eval.fair.headline import CONDITIONS, Headline, HeadlineFigure
from vcsd_eval.papers.dual_blade import evaluate as dual_blade_paper
from vcsd_eval.papers.instinfer.options import setup_of
from vcsd_eval.papers.instinfer.page_shares import trained
from vcsd_eval.papers.options import MachineOptions, Simulated


@dataclass(frozen=True, slots=True)
class FairInputs:
    """Where errors and requests come from."""

    model: Annotated[
        Path | None,
        typer.Option(help="model whose rows are recorded (default: smollm2 if fetched)", callback=check_model),
    ] = None
    text: texts.SourceText = None
    trace: Annotated[
        Path | None, typer.Option(help="OrbitFlow's public traces (default: in the folder VCSD_DATA, else generated)")
    ] = None

    def models(self) -> list[Path]:
        """The recorded model, and the bundled one."""
        if self.model:
            return [self.model]
        return [model for model in (trained(), CHECKPOINT) if model]


def _instinfer(inputs: FairInputs, tick: Tick) -> Headline:
    setup = setup_of(MachineOptions(), Simulated())
    rows = []
    tokens = setup.drive.geometry.page_bytes // (2 * setup.model.head_dim)
    for model in inputs.models():
        rows.append(recorded.record(model, inputs.text, tokens, tick))
    first, *others = (instinfer.headline(setup, row) for row in rows)
    tick(None)
    more = {f"recorded_on_{row.model}": other.figures for row, other in zip(rows[1:], others, strict=True)}
    return first.with_others(more, [note for other in others for note in other.notes[:1]])


def _dual_blade(inputs: FairInputs, tick: Tick) -> Headline:
    return dual_blade.headline(dual_blade_paper.runs_on(MachineOptions()), tick)


@dataclass(frozen=True, slots=True)
class HeadlineSource:
    """A paper's headline. ticks: how often making it ticks."""

    make: Callable[[FairInputs, Tick], Headline]
    ticks: Callable[[FairInputs], int]


PAPERS: Mapping[str, HeadlineSource] = {
    "instinfer": HeadlineSource(_instinfer, lambda given: recorded.TICKS * len(given.models()) + 1),
    "dual-blade": HeadlineSource(_dual_blade, lambda given: dual_blade.TICKS),
    "tierkv": HeadlineSource(lambda given, tick: tierkv.headline(tick), lambda given: tierkv.TICKS),
    "orbitflow": HeadlineSource(
        lambda given, tick: orbitflow.headline(given.trace or find("orbitflow"), tick), lambda given: orbitflow.TICKS
    ),
    "tutti": HeadlineSource(lambda given, tick: tutti.headline(), lambda given: 0),
}
Only = StrEnum("Only", [(name, name) for name in PAPERS])  # type: ignore[misc]


def experiment(
    inputs: FairInputs,
    only: Annotated[Only | None, typer.Option(help="paper whose headline is compared (default: all)")] = None,
) -> Outcome:
    """Every headline at equal schedule, error, hardware and service, with what moves it and where it loses."""
    names = [str(only)] if only else list(PAPERS)
    headlines = {}
    with progress("parts", sum(PAPERS[name].ticks(inputs) for name in names)) as tick:
        for name in names:
            headlines[name] = PAPERS[name].make(inputs, tick)
    result = {name: headline.as_json() for name, headline in headlines.items()}
    return Outcome(result, [part for name, headline in headlines.items() for part in _shown(name, headline)])


def _shown(name: str, headline: Headline) -> list[Any]:
    """A table of the figures, what moves them most, and where ours loses."""
    rows = [(condition, "", *_cells(headline.figures[condition])) for condition in _order(headline.figures)]
    for other, figures in headline.others.items():
        rows += [(condition, other, *_cells(figures[condition])) for condition in _order(figures)]
    title, columns = f"{name}: {headline.what} (modelled)", ("equal", "with", "ratio", "least", "most")
    shown: list[Any] = [table(title, columns, rows, left=("equal", "with"))]
    if headline.tornado:
        few = [
            (*(row[key] for key in ("condition", "constant")), f"{row['base']:g} {row['unit']}",
             f"{row['half']:.2f}", f"{row['double']:.2f}")
            for row in headline.tornado
            if abs(row["double"] - row["half"]) > 0.01
        ]  # fmt: skip
        columns = ("ratio", "constant", "value", "halved", "doubled")
        shown.append(
            table("Constants that move it by more than 0.01", columns, few, left=("ratio", "constant", "value"))
        )
    losses = [f"{row['setting']} = {row['value']}: {row['ratio']:.2f} of {row['other']}" for row in headline.loses_at]
    shown.append(f"ours loses at: {'; '.join(losses)}" if losses else "ours loses at none of the settings tried")
    return [*shown, *headline.notes]


def _order(figures: Mapping[str, HeadlineFigure]) -> list[str]:
    return [*(name for name in CONDITIONS if name in figures), *(name for name in figures if name not in CONDITIONS)]


def _cells(figure: HeadlineFigure) -> tuple[str, str, str]:
    return f"{figure.value:.2f}", f"{figure.low:.2f}", f"{figure.high:.2f}"
