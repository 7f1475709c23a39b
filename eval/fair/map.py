"""When a computational drive wins: against plain SSDs, host memory, recomputation, and KV data on the GPU."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from csd_spec.presets import INSTCSD_OVERLAPPED
from nvmevirt_config import load_drive
from vcsd.progress import Tick, progress
from vcsd.tables import table
from vcsd_eval.experiment import Outcome
from vcsd_eval.fair.map_picture import picture
from vcsd_eval.fair.points import (
    METHODS,
    RIVALS,
    SYSTEMS,
    Point,
    Row,
    boundary,
    points_along,
    points_of_plane,
    points_of_work,
    rates,
)
from vcsd_eval.options import Picture, check_picture
from vcsd_eval.papers.instinfer.systems import Constants, Setup
from vcsd_eval.papers.options import cell
from vcsd_eval.papers.profiles import Gpu, Host, Model, Ssd
from vcsd_eval.plot import save_figure
from vcsd_eval.serving.machines import CALL_S


@dataclass(frozen=True, slots=True)
class Base:
    """The point from which each axis is varied."""

    method: Annotated[str, typer.Option(help=f"attention and selection: {', '.join(METHODS)}")] = "ours"
    model: Annotated[str, typer.Option(help="model profile: a name or a YAML file")] = "llama-3.1-8b"
    gpu: Annotated[str, typer.Option(help="GPU profile: a name, a name with a count (8xh100), or a YAML file")] = (
        "a6000"
    )
    host: Annotated[str, typer.Option(help="host profile: a name or a YAML file")] = "pcie4"
    drive: Annotated[
        Path | None, typer.Option("--drive-config", help="YAML description of the drives (default: InstCSD)")
    ] = None
    batch: Annotated[int, typer.Option(min=1, max=1 << 16, help="sequences")] = 64
    context: Annotated[int, typer.Option(min=64, max=1 << 20, help="stored tokens per sequence")] = 32768
    drives: Annotated[int, typer.Option(min=1, max=1024, help="number of drives that share the heads")] = 1

    @property
    def point(self) -> Point:
        if self.method not in METHODS:
            raise ValueError(f"method = {self.method!r}: must be one of {', '.join(METHODS)}")
        setup = Setup(
            model=Model.load(self.model),
            gpu=Gpu.some(self.gpu),
            host=Host.load(self.host),
            ssd=Ssd.load("980pro"),
            drive=load_drive(self.drive) if self.drive else INSTCSD_OVERLAPPED,
            input=self.context,
            output=2,
            constants=Constants(sequence_layer_s=CALL_S),
        )
        point = Point(setup, METHODS[self.method], self.batch, self.drives)
        if not point.fill.fits:
            raise ValueError(
                f"batch = {self.batch}, context = {self.context}: more than the drives hold; take more drives"
            )
        return point


def experiment(base: Base, plot: Picture = None) -> Outcome:
    """When computational drives win: against plain SSDs, host memory, recomputation, and KV data on the GPU."""
    check_picture(plot)
    point = base.point
    axes, of_plane, of_work = (list(points(point)) for points in (points_along, points_of_plane, points_of_work))
    with progress("points", len(axes) + len(of_plane) + len(of_work)) as tick:
        rows, grid, work = (
            [_evaluated(where, at, tick) for where, at in points] for points in (axes, of_plane, of_work)
        )
        ties = [boundary(point, rival) for rival in RIVALS]
        errors = [boundary(at, rival) for _, at in axes for rival in RIVALS]
    percents = [abs(row["error_percent"]) for row in errors if row["error_percent"] is not None]
    result = {
        "base": {name: str(value) for name, value in asdict(base).items()},
        **rates(point),
        "boundaries": ties,
        "closed_form_error_percent": {
            "median": statistics.median(percents),
            "worst": max(percents),
            "ties": len(percents),
        },
        "axes": rows,
        "plane": grid,
        "work": work,
    }
    if plot:
        save_figure(picture(result, point), plot)
    return Outcome(result, _shown(base, result))


def _evaluated(where: Row, at: Point, tick: Tick) -> Row:
    row = {**where, **rates(at)}
    tick(None)
    return row


def _shown(base: Base, result: Row) -> list[Any]:
    columns = ("axis", "value", *SYSTEMS, "fastest", "drive / plain SSD")
    cells = [
        (row["axis"], f"{row['value']}", *(cell(row[name]) for name in (*SYSTEMS, "best", "csd_over_plain_ssd")))
        for row in result["axes"]
    ]
    title = (
        f"Tokens/s in decode of {base.model} on {base.gpu}, {base.method}, batch {base.batch}, "
        f"{base.context:,} tokens, {base.drives} drives; one axis varied at a time (modelled)"
    )
    ties = [
        (row["rival"], row["rate"], *(cell(row[name]) for name in ("closed_form_gb_s", "model_gb_s", "error_percent")))
        for row in result["boundaries"]
    ]
    errors = result["closed_form_error_percent"]
    return [
        table(title, columns, cells, left=("axis", "fastest")),
        table(
            "Computational drives win where the rival's rate is below",
            ("rival", "rate", "closed form, GB/s", "model, GB/s", "error %"),
            ties,
            left=("rival", "rate"),
        ),
        f"closed form over all axes: median error {errors['median']:.1f} %, worst {errors['worst']:.1f} % "
        f"of {errors['ties']} ties",
    ]
