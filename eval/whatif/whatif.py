"""`vcsd whatif`: a sweep over fields of a drive and of its use, with the Pareto front as table, picture and csv.

A point is a decode step without payload: selections are random, in a fraction of the pages. The GPU's own time is not
part of a step, and accuracy is not measured: `vcsd eval methods` does that.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any

import typer

from csd_spec import DriveSpec
from csd_spec.checked import from_values
from csd_spec.presets import DRIVES
from nvmevirt_config import load_drive
from nvmevirt_config.document import load_yaml
from vcsd.progress import progress
from vcsd.tables import table
from vcsd_eval.experiment import Outcome
from vcsd_eval.options import Picture, RayAddress, check_picture
from vcsd_eval.papers.profiles import Model
from vcsd_eval.partial_results import ResultCache, fingerprint
from vcsd_eval.plot import new_figure, save_figure
from vcsd_eval.sweep import Done, cores, sweep, sweep_on_ray, sweep_rest
from vcsd_eval.whatif.point import DesignPoint, Row, simulate

USES = ("method", "layout", "network", "drives", "compression", "context", "batch", "page_share", "sampled_layers")
"""What can be varied besides the drive's fields."""

MAX_POINTS = 4096


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """Sweep.

    Attributes:
        vary: Fields and their values; the sweep has all combinations.
        set: Fields with one value.
        cost: Weights of fields; the cost of a point is the weighted sum, and a third objective.
    """

    vary: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=V1,V2", help="field and its values; may be repeated")
    ] = None
    set: Annotated[list[str] | None, typer.Option(metavar="FIELD=VALUE", help="field to set; may be repeated")] = None
    cost: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=WEIGHT", help="cost of a field's unit; may be repeated")
    ] = None
    model: Annotated[str, typer.Option(help="model profile: a name or a YAML file")] = "llama-3-8b"


@dataclass(frozen=True, slots=True)
class FileOptions:
    """Files, and where the sweep runs."""

    csv_out: Annotated[Path | None, typer.Option(help="csv file of all points to write")] = None
    plot: Picture = None
    checkpoint_dir: Annotated[
        Path | None, typer.Option(help="folder for intermediate results, used to continue a killed run")
    ] = Path("build/whatif")
    ray: RayAddress = None


def whatif(
    drive: Annotated[str, typer.Argument(metavar="DRIVE", help="YAML description of a drive, or name of a preset")],
    options: SweepOptions = SweepOptions(),
    where: FileOptions = FileOptions(),
) -> Outcome:
    """Compare variants of a drive, its methods, layouts and networks; print the Pareto front."""
    check_picture(where.plot)
    if where.csv_out and not where.csv_out.absolute().parent.is_dir():
        raise ValueError(f"{where.csv_out}: there is no folder {where.csv_out.parent}: create it")
    spec = DRIVES.get(drive) or load_drive(Path(drive))
    described = asdict(spec)
    fixed = {name: values[0] for name, values in _varied(options.set or (), described)}
    varied = dict(_varied(options.vary or (), described))
    weights = {name: _number(name, values[0]) for name, values in _varied(options.cost or (), described)}
    if both := fixed.keys() & varied.keys():
        raise ValueError(f"{min(both)}: is set and varied: give it once")
    if prod(map(len, varied.values())) > MAX_POINTS:
        raise ValueError(f"--vary: {prod(map(len, varied.values())):,} combinations: must be at most {MAX_POINTS:,}")
    model = Model.load(options.model)
    combinations = [dict(zip(varied, values, strict=True)) for values in product(*varied.values())]
    points = [_point(spec, model, fixed | combination) for combination in combinations]
    done = _run(points, where)
    rows = [_row(*each, weights) for each in zip(points, combinations, done, strict=True)]
    objectives = ("step_ms", "joules", *(("cost",) if weights else ()))
    _mark_front(rows, objectives)
    if where.csv_out:
        _write_csv(where.csv_out, rows)
    if where.plot:
        _draw(where.plot, rows, list(varied), objectives[-1])
    front = [row for row in rows if row["pareto"]]
    return Outcome(
        {
            "drive": spec.name,
            "model": model.name,
            "objectives": list(objectives),
            "sampled_layers": points[0].sampled_layers,
            "layers": model.shape.layers,
            "points": len(rows),
            "front": len(front),
            "rows": rows,
        },
        [_table(rows, list(varied), bool(weights))],
        [f"{len(front)} of {len(rows)} points are on the front (*) of {', '.join(objectives)}; GPU not included"],
    )


def _varied(texts: Iterable[str], described: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Full names and values of FIELD=V1,V2; values are read as YAML."""
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not all(value.strip() for value in values.split(",")):
            raise ValueError(f"{text!r}: must be FIELD=VALUE, or FIELD=V1,V2 to vary it")
        yield _full_name(name.strip(), described), [load_yaml(value) for value in values.split(",")]


def _full_name(name: str, described: Mapping[str, Any]) -> str:
    """Name of a field with its part of the drive: `geometry.channels` for `channels`."""
    names = [*USES, *_flat(described)]
    matching = [full for full in names if name in (full, full.rpartition(".")[2])]
    if name in matching:
        return name
    if len(matching) != 1:
        says = f"could be {' or '.join(matching)}: name one" if matching else f"must be one of {', '.join(names)}"
        raise ValueError(f"field {name!r}: {says}")
    return matching[0]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = dict[str, Any]()
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} = {value!r}: a cost needs a number")
    return value


def _point(spec: DriveSpec, model: Model, changes: Mapping[str, Any]) -> DesignPoint:
    """The combination with these values; raises ValueError with the field that is invalid."""
    values = asdict(spec)
    for name, value in changes.items():
        if name not in USES:
            *parts, last = name.split(".")
            inner = values
            for part in parts:
                inner = inner[part]
            inner[last] = value
    uses = {name: value for name, value in changes.items() if name in USES}
    kinds = {field.name: type(field.default) for field in fields(DesignPoint) if field.name in USES}
    for name, value in uses.items():
        wanted = (int, float) if kinds[name] is float else kinds[name]
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise ValueError(f"{name} = {value!r}: must be {'text' if kinds[name] is str else 'a number'}")
    return DesignPoint(from_values(values, DriveSpec), model, **uses)


def _run(points: Sequence[DesignPoint], where: FileOptions) -> list[Row]:
    """Simulate all points, those that take longest first; a killed run continues."""
    results = ResultCache(where.checkpoint_dir and where.checkpoint_dir / f"{fingerprint(points[:1], ())}.jsonl")
    order = sorted(range(len(points)), key=lambda number: -points[number].batch * points[number].context)

    with progress("points", len(points)) as tick:

        def compute(left: Sequence[DesignPoint], done: Done) -> None:
            for _ in range(len(points) - len(left)):
                tick(None)
            if where.ray:
                sweep_on_ray(simulate, left, where.ray, tick, done)
            else:
                sweep(simulate, left, cores(), tick, done)

        result: list[Row] = sweep_rest([points[number] for number in order], results, compute)
    results.close()
    rows: list[Row] = [{}] * len(points)
    for number, row in zip(order, result, strict=True):
        rows[number] = row
    return rows


def _row(point: DesignPoint, varied: Mapping[str, Any], done: Row, weights: Mapping[str, float]) -> Row:
    joules = done.get("joules_per_token")
    row = {**varied, "layout_used": point.attention.layout, **done, "joules": joules and joules["value"]}
    if weights:
        values = _flat(asdict(point.spec)) | {name: getattr(point, name) for name in USES}
        row["cost"] = sum(weight * _number(name, values[name]) for name, weight in weights.items())
    return row


def _mark_front(rows: Sequence[Row], objectives: Sequence[str]) -> None:
    """Set `pareto`: no other point is at least as good in all objectives and better in one."""
    valid = [[row[name] for name in objectives] for row in rows if not row["error"]]
    for row in rows:
        own = [row.get(name) for name in objectives]
        row["pareto"] = not row["error"] and not any(
            all(a <= b for a, b in zip(other, own, strict=True)) and other != own for other in valid
        )


def _write_csv(path: Path, rows: Sequence[Row]) -> None:
    flat = [_flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(flat)


def _table(rows: Sequence[Row], varied: Sequence[str], has_cost: bool) -> Any:
    columns = (*(name.rpartition(".")[2] for name in varied), "step, ms", "flash", "engine", "transfer", "tokens/s")
    shown = []
    for row in sorted(rows, key=lambda row: (bool(row["error"]), row["step_ms"] or 0)):
        names = [str(row[name]) for name in varied]
        if row["error"]:
            shown.append((*names, "does not fit", *[""] * (6 + has_cost)))
            continue
        times = [f"{row[name]:.2f}" for name in ("step_ms", "flash_ms", "engine_ms", "transfer_ms")]
        more = [f"{row['tokens_per_s']:,.0f}", f"{row['joules']:.3g}", *([f"{row['cost']:,.4g}"] if has_cost else [])]
        shown.append((*names, *times, *more, "*" if row["pareto"] else ""))
    cost = ("cost",) if has_cost else ()
    return table("Decode step of all layers in simulated time", (*columns, "J/token", *cost, "front"), shown)


def _draw(path: Path, rows: Sequence[Row], varied: Sequence[str], other: str) -> None:
    figure, axes = new_figure()
    valid = [row for row in rows if not row["error"]]
    front = sorted((row for row in valid if row["pareto"]), key=lambda row: row["step_ms"])
    axes.plot([row["step_ms"] for row in valid], [row[other] for row in valid], "o", alpha=0.5)
    axes.plot([row["step_ms"] for row in front], [row[other] for row in front], "o-", label="Pareto front")
    for row in front:
        axes.annotate(", ".join(str(row[name]) for name in varied), (row["step_ms"], row[other]), fontsize=7)
    axes.set_xlabel("decode step, ms (simulated, without the GPU)")
    axes.set_ylabel("J per token" if other == "joules" else other)
    axes.legend()
    save_figure(figure, path)
