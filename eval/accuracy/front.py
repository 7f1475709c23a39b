"""Which methods have the least error for the bytes that cross the flash channels: chosen on a text, shown on others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from attention_engine import METHODS, Methods, load_methods
from attention_engine.methods.progressive import progressive
from vcsd.loading import CHECKPOINT, load
from vcsd.options import MethodsFile, ModelFolder
from vcsd.progress import Tick, no_tick, progress, status
from vcsd.tables import table
from vcsd_eval.accuracy import texts
from vcsd_eval.accuracy.compared_methods import OURS_BEGIN, Trial, contenders, trials
from vcsd_eval.accuracy.errors import Row, label, measured
from vcsd_eval.accuracy.layers import Layer, Passages, record_layers
from vcsd_eval.accuracy.recorded import TEXT
from vcsd_eval.accuracy.selectors import kept_results, memory
from vcsd_eval.experiment import Outcome
from vcsd_eval.options import Picture, check_picture, numbers
from vcsd_eval.partial_results import ResultCache
from vcsd_eval.plot import new_figure, save_figure

COLUMNS = (
    "name",
    "budget",
    "convention",
    "counted_by",
    "bytes_fetched_share",
    "output_rel_error",
    "output_rel_error_p99",
    "output_rel_error_worst",
)
LEAST = {"-1e-4": 1e-4, "-1e-3": 1e-3}  # gains that a refined page must have, by suffix of the methods' names
SHOWN = 3  # of the best at each budget
Texts = dict[str, list[Layer]]  # layers recorded on each


@dataclass(frozen=True, slots=True)
class Short(Passages):
    """Sizes of a recording; smaller than for `eval methods`, as more trials are measured."""

    tokens: Annotated[int, typer.Option(min=64, max=1 << 17, help="prompt length, tokens")] = 1024
    sequences: Annotated[int, typer.Option("--num-passages", min=1, max=1024, help="number of passages per text")] = 2


def searched(methods: Methods, compressions: list[float]) -> tuple[Methods, list[Trial]]:
    """Every contender at every budget, and progressive precision that spends less where it gains little.

    Returns the methods by which the contenders' are known, too.
    """
    known = contenders(methods)
    ours = [each for each in known if each.method == "progressive" and each.own is None]
    for contender, suffix in product(ours, LEAST):
        known.append(replace(contender, name=contender.name + suffix, method=contender.method + suffix))
    more = {f"progressive{suffix}": partial(progressive, least=least) for suffix, least in LEAST.items()}
    return {**methods, **more}, trials(known, compressions)


def on_front(points: Sequence[Row], ideal: set[str]) -> list[bool]:
    """Which points no other has at most the bytes and at most the error of; of equal ones the first.

    Ideal methods, which no drive has, are never on the front and exclude no other point.
    """
    order = sorted(range(len(points)), key=lambda i: (points[i]["bytes_fetched_share"], points[i]["output_rel_error"]))
    on, least = [False] * len(points), float("inf")
    for i in order:
        if points[i]["name"] not in ideal and points[i]["output_rel_error"] < least:
            on[i], least = True, points[i]["output_rel_error"]
    return on


def by_budget(points: Sequence[Row], compressions: Sequence[float], ideal: set[str]) -> list[Row]:
    """For each budget of bytes that cross the SHOWN methods of least error within it, each at its best point, and for
    each the same of those on drives alone."""
    rows: list[Row] = []
    for c in compressions:
        for drives in (False, True):
            best: dict[str, Row] = {}
            for point in sorted(points, key=lambda point: point["output_rel_error"]):
                allowed = point["name"] not in ideal and not (drives and point["counted_by"] == "element")
                if allowed and point["bytes_fetched_share"] <= 1 / c:
                    best.setdefault(point["name"], point)
            for place, point in enumerate(list(best.values())[:SHOWN]):
                of = {"within": 1 / c, "of": "drives" if drives else "all", "place": place + 1}
                rows.append(of | {name: point[name] for name in COLUMNS})
    return rows


def bench_front(
    layers: list[Layer],
    tried: Sequence[Trial],
    methods: Methods = METHODS,
    tick: Tick = no_tick,
    kept: ResultCache | None = None,
) -> list[Row]:
    """All trials, as points of bytes and error; columns as `measured` has them, and whether each is on the front of
    all methods (`front`) and on that of methods on drives (`front_drives`)."""
    points = _points(layers, tried, methods, tick, kept)
    ideal = _ideal(tried)
    front = on_front(points, ideal)
    drives = on_front(points, ideal | {trial.contender.name for trial in tried if trial.contender.arrays})
    each = zip(points, front, drives, strict=True)
    return [point | {"front": of_all, "front_drives": of_drives} for point, of_all, of_drives in each]


def report_front(
    layers: Texts,
    best: Sequence[Trial],
    methods: Methods = METHODS,
    tick: Tick = no_tick,
    kept: ResultCache | None = None,
) -> list[Row]:
    """Run the best trials on other texts."""
    return [
        {"text": name} | point for name in layers for point in _points(layers[name], best, methods, tick, kept, name)
    ]


def _points(
    layers: list[Layer], tried: Sequence[Trial], methods: Methods, tick: Tick, kept: ResultCache | None, text: str = ""
) -> list[Row]:
    done, rows = kept or ResultCache(None), []
    for trial in tried:
        row, _ = done.get(f"{text} {trial}", partial(measured, trial, layers, methods, tick))
        rows.append({name: row[name] for name in COLUMNS})
    return rows


def _ideal(tried: Sequence[Trial]) -> set[str]:
    return {trial.contender.name for trial in tried if trial.contender.ideal}


def bytes_and_errors(points: Sequence[Row], ideal: set[str]) -> Any:
    """A figure of all points by kind, with lines through both fronts. Dense attention has no error to show."""
    figure, axes = new_figure()
    shown = [point for point in points if point["name"] != "dense"]
    kinds = {
        "ours": ("o", "C0"),
        "rivals on drives": ("x", "C1"),
        "rivals, bytes by element": ("^", "C2"),
        "what no drive does": ("+", "0.6"),
    }
    for kind, (marker, color) in kinds.items():
        mine = [point for point in shown if _kind(point, ideal) == kind]
        axes.plot(*_across(mine), marker, color=color, label=kind, markersize=4)
    for flag, style in (("front", "-"), ("front_drives", ":")):
        best = sorted((point for point in shown if point[flag]), key=lambda point: point["bytes_fetched_share"])
        axes.plot(*_across(best), style, color="black", linewidth=1, label=flag.replace("_", " of "))
        for point in best:
            where = point["bytes_fetched_share"], point["output_rel_error"]
            axes.annotate(point["name"], where, xytext=(3, 3), textcoords="offset points", fontsize=4)
    axes.set(
        xscale="log", yscale="log", xlabel="bytes fetched / bytes of K and V", ylabel="relative error of the output"
    )
    axes.legend(fontsize=7)
    return figure


def _kind(point: Row, ideal: set[str]) -> str:
    if point["name"] in ideal:
        return "what no drive does"
    if point["name"].startswith(OURS_BEGIN):
        return "ours"
    return "rivals on drives" if point["counted_by"] == "page" else "rivals, bytes by element"


def _across(points: list[Row]) -> tuple[list[float], list[float]]:
    return [point["bytes_fetched_share"] for point in points], [point["output_rel_error"] for point in points]


def _texts(text: Path | None, others: list[Path]) -> dict[str, str]:
    """Texts by name: first the one on which methods are chosen, then those on which they are reported."""
    name, whole = str(text or TEXT.name), texts.read(text)
    half = len(whole) // 2
    parts = {f"{name}, first half": whole[:half], f"{name}, second half": whole[half:]}
    return parts | {str(each): texts.read(each) for each in others}


def _recorded(written: dict[str, str], model: Path, passages: Passages, tick: Tick) -> Texts:
    """Raise ValueError with the text's name if a text is too short."""
    loaded, tokenizer = load(model)
    found: Texts = {}
    for name, text in written.items():
        try:
            found[name] = record_layers(loaded, tokenizer, text, passages, tick)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return found


def experiment(
    passages: Short,
    text: texts.SourceText = None,
    report: Annotated[
        list[Path] | None, typer.Option("--holdout-text", help="further text to report on; repeatable")
    ] = None,
    model: ModelFolder = None,
    compression: Annotated[
        str, typer.Option(help="comma-separated values C of the budget 1/C, bytes convention")
    ] = "2,3,4,5.333,8,10.667,16,32",
    plot: Picture = None,
    methods: MethodsFile = None,
    progress_dir: Annotated[
        Path, typer.Option("--checkpoint-dir", help="folder for intermediate results, used to continue a killed run")
    ] = Path("build/front"),
) -> Outcome:
    """Who has the least error for the bytes: chosen on one half of a text, reported on the other."""
    compressions = numbers("compression", compression, float)
    known, tried = searched(load_methods(methods), compressions)
    check_picture(plot)
    folder = model or CHECKPOINT
    with status("reading texts"):
        written = _texts(text, report or [])
    with progress("passages recorded", passages.sequences * len(written)) as tick:
        layers = _recorded(written, folder, passages, tick)
    used = memory([layer for each in layers.values() for layer in each])
    chosen_on, *others = layers
    numbers_ = [layer.number for layer in layers[chosen_on]]
    kept = kept_results(progress_dir, [written, asdict(passages)], folder, methods)
    with progress("layers", len(tried) * len(numbers_)) as tick:
        points = bench_front(layers.pop(chosen_on), tried, known, tick, kept)
    best = [trial for trial, point in zip(tried, points, strict=True) if point["front"] or point["front_drives"]]
    with progress("layers of other texts", len(best) * len(numbers_) * len(others)) as tick:
        reported = report_front(layers, best, known, tick, kept)
    kept.close()
    ideal = _ideal(tried)
    if plot:
        save_figure(bytes_and_errors(points, ideal), plot)
    leaders = by_budget(points, compressions, ideal)
    front = [{"text": chosen_on} | point for point in points if point["front"] or point["front_drives"]]
    sizes = {name: value for name, value in asdict(passages).items() if name != "layers"}
    where = {"model": folder.name, "text": chosen_on, **sizes, "layers": numbers_, **used}
    result = where | {"points": points, "by_budget": leaders, "report": reported}
    return Outcome(result, [_leaders(leaders), _shown(front + reported, len(points))])


def _leaders(rows: list[Row]) -> Any:
    """A table of the best at each budget."""
    cells = []
    for row in rows:
        shares = f"{row['within']:.3f}", row["of"], str(row["place"]), label(row), f"{row['bytes_fetched_share']:.3f}"
        errors = (f"{row[f'output_rel_error{suffix}']:.4f}" for suffix in ("", "_p99", "_worst"))
        cells.append((*shares, *errors))
    columns = ("bytes within", "of", "place", "method", "fetched", "error", "p99", "worst")
    return table("The least error within each budget of bytes that cross", columns, cells, ("of", "method"))


def _shown(rows: list[Row], tried: int) -> Any:
    """A table of the front, on each text."""
    columns = ("text", "method", "bytes counted by", "budget", "fetched", "error")
    cells = [
        (
            row["text"],
            label(row),
            row["counted_by"],
            f"{row['budget']:.3f}",
            f"{row['bytes_fetched_share']:.3f}",
            f"{row['output_rel_error']:.4f}",
        )
        for row in rows
    ]
    return table(f"The fronts of {tried} points, chosen on the first text", columns, cells, columns[:3])
