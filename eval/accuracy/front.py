"""Which methods have the least error for the bytes that cross the flash channels: chosen on a text, shown on others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from attention_engine import METHODS, Methods, load_methods
from attention_engine.methods.progressive import progressive
from csd_spec.planes import number_of
from eval.accuracy.recorded import TEXT
from eval.accuracy.selectors import Contender, Layer, Passages, Row, contenders, measured, record_layers, trials
from eval.experiment import Outcome
from eval.options import Picture, TextFile, check_picture, numbers
from eval.plot import new_figure, save_figure
from vcsd.loading import CHECKPOINT, load
from vcsd.options import MethodsFile, ModelFolder
from vcsd.progress import Tick, no_tick, progress, status
from vcsd.tables import table

COLUMNS = ("name", "budget", "bytes_fetched_share", "output_rel_error")
PLANE_BITS = (2, 3, 4)
TOP_P = {1.0: "", 0.99: "-top-p-0.99", 0.95: "-top-p", 0.9: "-top-p-0.9"}  # and what they are called
BETWEEN = 2.0**0.5  # of a budget and one between it and the next
Texts = dict[str, list[Layer]]  # layers recorded on each
Trials = list[tuple[Contender, float]]


@dataclass(frozen=True, slots=True)
class Short(Passages):
    """What is recorded of each text: less than for `eval selectors`, as more is tried."""

    tokens: Annotated[int, typer.Option(min=64, max=1 << 17, help="prompt length")] = 1024
    steps: Annotated[int, typer.Option(min=1, max=1 << 17, help="decode steps")] = 4
    sequences: Annotated[int, typer.Option(min=1, max=1024, help="passages of each text")] = 2


def searched(methods: Methods, compressions: list[float]) -> tuple[Methods, Trials]:
    """Every contender at every budget; and ours on planes with every top-p, at these budgets and at those between.

    Returns the methods by which the contenders' are known, too.
    """
    known = contenders(methods)
    names, tried = {contender.name for contender in known}, trials(known, compressions)
    finer = sorted({*compressions, *(c * BETWEEN for c in compressions if c < max(compressions))})
    for bits, p in product(PLANE_BITS, TOP_P):
        contender = Contender(f"ours-planes{bits}{TOP_P[p]}", f"progressive{TOP_P[p]}", number_of(bits, exact=False))
        tried += [(contender, c) for c in finer if contender.name not in names or c not in compressions]
    return {**methods, **{f"progressive{name}": partial(progressive, top_p=p) for p, name in TOP_P.items()}}, tried


def on_front(points: list[Row], ideal: set[str]) -> list[bool]:
    """Which points no other has at most the bytes and at most the error of; of equal ones the first.

    What is ideal, as no drive does it, is never on the front and keeps nobody from it.
    """
    order = sorted(range(len(points)), key=lambda i: (points[i]["bytes_fetched_share"], points[i]["output_rel_error"]))
    on, least = [False] * len(points), float("inf")
    for i in order:
        if points[i]["name"] not in ideal and points[i]["output_rel_error"] < least:
            on[i], least = True, points[i]["output_rel_error"]
    return on


def bench_front(layers: list[Layer], tried: Trials, methods: Methods = METHODS, tick: Tick = no_tick) -> list[Row]:
    """All trials, as points of bytes and error; columns as `measured` has them, and whether each is on the front."""
    points = _points(layers, tried, methods, tick)
    front = on_front(points, {contender.name for contender, _ in tried if contender.ideal})
    return [point | {"front": on} for point, on in zip(points, front, strict=True)]


def report_front(texts: Texts, best: Trials, methods: Methods = METHODS, tick: Tick = no_tick) -> list[Row]:
    """The trials that were best, on other texts."""
    return [{"text": name} | point for name in texts for point in _points(texts[name], best, methods, tick)]


def _points(layers: list[Layer], tried: Trials, methods: Methods, tick: Tick) -> list[Row]:
    rows = (measured(contender, c, layers, methods, tick) for contender, c in tried)
    return [{name: row[name] for name in COLUMNS} for row in rows]


def bytes_and_errors(points: list[Row], ideal: set[str]) -> Any:
    """A figure of all points, ours and rivals' apart, and a line through the front. dense has no error to show."""
    figure, axes = new_figure()
    shown = [point for point in points if point["name"] != "dense"]
    kinds = {"ours": ("o", "C0"), "rivals": ("x", "C1"), "what no drive does": ("+", "0.6")}
    for label, (marker, color) in kinds.items():
        mine = [point for point in shown if _kind(point["name"], ideal) == label]
        axes.plot(*_across(mine), marker, color=color, label=label, markersize=4)
    best = sorted((point for point in shown if point["front"]), key=lambda point: point["bytes_fetched_share"])
    axes.plot(*_across(best), "-", color="black", linewidth=1, label="front")
    for point in best:
        where = point["bytes_fetched_share"], point["output_rel_error"]
        axes.annotate(point["name"], where, xytext=(3, 3), textcoords="offset points", fontsize=4)
    axes.set(
        xscale="log", yscale="log", xlabel="bytes fetched / bytes of K and V", ylabel="relative error of the output"
    )
    axes.legend(fontsize=7)
    return figure


def _kind(name: str, ideal: set[str]) -> str:
    return "what no drive does" if name in ideal else "ours" if name.startswith("ours") else "rivals"


def _across(points: list[Row]) -> tuple[list[float], list[float]]:
    return [point["bytes_fetched_share"] for point in points], [point["output_rel_error"] for point in points]


def _texts(text: Path | None, others: list[Path]) -> dict[str, str]:
    """What is chosen on, then what is reported on, by name."""
    found = text or TEXT
    whole = _read(found)
    half = len(whole) // 2
    parts = {f"{found.name}, first half": whole[:half], f"{found.name}, second half": whole[half:]}
    return parts | {str(each): _read(each) for each in others}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: {error}") from error


def _recorded(texts: dict[str, str], model: Path | None, passages: Passages) -> Texts:
    """Raises ValueError with the text's name for one that is too short."""
    loaded, tokenizer = load(model or CHECKPOINT)
    found: Texts = {}
    for name, written in texts.items():
        try:
            found[name] = record_layers(loaded, tokenizer, written, passages)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return found


def experiment(
    passages: Short,
    text: TextFile = None,
    report: Annotated[list[Path] | None, typer.Option(help="another text to report on; may be given again")] = None,
    model: ModelFolder = None,
    compression: Annotated[
        str, typer.Option(help="budgets 1/C in the bytes convention, with commas")
    ] = "2,4,5.333,8,16",
    plot: Picture = None,
    methods: MethodsFile = None,
) -> Outcome:
    """Who has the least error for the bytes: chosen on one half of a text, reported on the other."""
    known, tried = searched(load_methods(methods), numbers("compression", compression, float))
    check_picture(plot)
    with status("recording"):
        texts = _recorded(_texts(text, report or []), model, passages)
    chosen_on, *others = texts
    layers = len(texts[chosen_on])
    with progress("layers", len(tried) * layers) as tick:
        points = bench_front(texts.pop(chosen_on), tried, known, tick)
    best = [trial for trial, point in zip(tried, points, strict=True) if point["front"]]
    with progress("layers of other texts", len(best) * layers * len(others)) as tick:
        reported = report_front(texts, best, known, tick)
    if plot:
        save_figure(bytes_and_errors(points, {contender.name for contender, _ in tried if contender.ideal}), plot)
    front = [{"text": chosen_on} | point for point in points if point["front"]]
    sizes = {"tokens": passages.tokens, "steps": passages.steps, "sequences": passages.sequences, "layers": layers}
    result = {"text": chosen_on, **sizes, "points": points, "report": reported}
    return Outcome(result, [_shown(front + reported, len(points))])


def _shown(rows: list[Row], tried: int) -> Any:
    """A table of the front, on each text."""
    columns = ("text", "method", "budget", "fetched", "error")
    shares = ("budget", "bytes_fetched_share")
    cells = [
        (row["text"], row["name"], *(f"{row[share]:.3f}" for share in shares), f"{row['output_rel_error']:.4f}")
        for row in rows
    ]
    return table(f"The front of {tried} points, chosen on the first text", columns, cells, columns[:2])
