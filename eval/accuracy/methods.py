"""Bytes, error, rank and modelled time of each attention method on recorded or generated q, k and v."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from attention_engine import METHODS, Methods, load_methods
from vcsd.loading import CHECKPOINT, load
from vcsd.options import MAX_SEED, MethodsFile, ModelFolder
from vcsd.progress import Tick, no_tick, progress, status
from vcsd.tables import table
from vcsd_eval.accuracy import texts
from vcsd_eval.accuracy.compared_methods import OURS_BEGIN, Trial, chosen, contenders, trials
from vcsd_eval.accuracy.errors import Row, label, measured
from vcsd_eval.accuracy.layers import Layer, Passages, record_layers
from vcsd_eval.accuracy.recorded import TEXT
from vcsd_eval.accuracy.scenarios import SCENARIOS, scenario
from vcsd_eval.experiment import Outcome
from vcsd_eval.options import Picture, check_picture, numbers
from vcsd_eval.partial_results import ResultCache, fingerprint
from vcsd_eval.plot import new_figure, save_figure

Texts = Mapping[str, list[Layer]]  # layers recorded on each text, or of each scenario
BYTES, ERROR = "bytes_fetched_share", "output_rel_error"


def bench_methods(
    layers: Texts,
    tried: Sequence[Trial],
    methods: Methods = METHODS,
    tick: Tick = no_tick,
    cache: ResultCache | None = None,
) -> dict[str, Any]:
    """Every trial on the decode steps of each text.

    Returns:
        `methods` has a row for each text and trial, with the columns of `measured`, its `text`, and its ranks among
        the rows of this text; `by_layer` has a row for each of their layers.
    """
    done = cache or ResultCache(None)
    rows: list[Row] = []
    by_layer: list[Row] = []
    ideal = {trial.contender.name for trial in tried if trial.contender.ideal}
    for text, recorded in layers.items():
        of_text = []
        for trial in tried:
            whole, parts = done.get(f"{text} {trial}", partial(measured, trial, recorded, methods, tick))
            of_text.append({"text": text} | whole)
            by_layer += [{"text": text} | part for part in parts]
        rows += ranked(of_text, ideal)
    first = next(iter(layers.values()))
    return {
        "tokens": first[0].tokens,
        "steps": first[0].steps,
        "sequences": len(first[0].recorded.q),
        "layers": [layer.number for layer in first],
        "methods": rows,
        "by_layer": by_layer,
    }


def ranked(rows: Sequence[Row], ideal: set[str]) -> list[Row]:
    """Rows of one text with their ranks at equal bytes.

    `rank` is 1 more than the number of methods that need at most the row's fetched bytes for at most its error, so
    rows of rank 1 are the front of bytes over error. Ideal methods, which no drive can implement, have no rank and
    lower none. `rank_on_drives` is the same among methods on drives, whose bytes are whole pages.
    """
    real = [row for row in rows if row["name"] not in ideal]
    on_drives = [row for row in real if row["counted_by"] == "page"]
    return [row | {"rank": _rank(row, real), "rank_on_drives": _rank(row, on_drives)} for row in rows]


def _rank(row: Row, others: Sequence[Row]) -> int | None:
    """Place of a row among others at its bytes; None if it is not one of them."""
    if row not in others:
        return None
    point = row[BYTES], row[ERROR]
    better = (r for r in others if r[BYTES] <= point[0] and r[ERROR] <= point[1] and (r[BYTES], r[ERROR]) != point)
    return 1 + len({label(r) for r in better})


def means(rows: Sequence[Row], ideal: set[str]) -> list[Row]:
    """Mean bytes and errors over the texts, a row for each trial, with ranks by these means."""
    count = sum(row["text"] == rows[0]["text"] for row in rows)
    averaged = []
    for of_trial in (rows[first::count] for first in range(count)):
        share, error = (sum(row[name] for row in of_trial) / len(of_trial) for name in (BYTES, ERROR))
        within = all(row["within_budget"] for row in of_trial)
        averaged.append(of_trial[0] | {BYTES: share, ERROR: error, "within_budget": within})
    return ranked(averaged, ideal)


def errors_over_bytes(rows: Sequence[Row]) -> Any:
    """A figure of the error over the bytes fetched: a line for each method, and both fronts in black."""
    figure, axes = new_figure(width=11, height=7)
    shown = [row for row in rows if row["within_budget"] and row["name"] != "dense"]
    lines = [(name, [row for row in shown if label(row) == name]) for name in dict.fromkeys(map(label, shown))]
    for name, points in lines:
        axes.plot(*_across(points), "o-" if name.startswith(OURS_BEGIN) else "x--", label=name, markersize=4, lw=1)
    for column, style, name in (("rank", "-", "front"), ("rank_on_drives", ":", "front of drives")):
        front = sorted((row for row in rows if row[column] == 1 and row["name"] != "dense"), key=lambda row: row[BYTES])
        axes.plot(*_across(front), style, color="black", linewidth=2, label=name)
    axes.set(
        xscale="log", yscale="log", xlabel="bytes fetched / bytes of K and V", ylabel="relative error of the output"
    )
    axes.legend(fontsize=6, ncols=2, loc="upper left", bbox_to_anchor=(1.01, 1))
    return figure


def _across(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [row[BYTES] for row in rows], [row[ERROR] for row in rows]


@dataclass(frozen=True, slots=True)
class Recordings:
    """Recorded or generated q, k and v."""

    text: texts.SourceTexts = None
    model: ModelFolder = None
    scenarios: Annotated[
        bool, typer.Option("--scenarios", help="generated rows on which methods are known to fail, instead of a text")
    ] = False
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="random seed of --scenarios")] = 0

    def __post_init__(self) -> None:
        for name, value in (("text", self.text), ("model", self.model)):
            if self.scenarios and value:
                raise ValueError(f"--{name}: has no effect with --scenarios, which generates its rows; leave it out")

    @property
    def folder(self) -> Path:
        """Folder of the model."""
        return self.model or CHECKPOINT

    def read(self) -> dict[str, str]:
        """Texts by name; none for scenarios."""
        paths: Sequence[Path | None] = () if self.scenarios else self.text or (None,)
        return {str(path or TEXT.name): texts.read(path) for path in paths}

    def layers(self, written: Mapping[str, str], passages: Passages) -> Texts:
        """Layers of the model on each text, or of each scenario."""
        return _generated(passages, self.seed) if self.scenarios else _recorded(self.folder, written, passages)


@dataclass(frozen=True, slots=True)
class Compared:
    """Methods and their budgets."""

    method: Annotated[str | None, typer.Option(help="comma-separated methods (default: all)")] = None
    compression: Annotated[str, typer.Option(help="comma-separated values C of the budget 1/C, bytes convention")] = (
        "2,4,5.333,8,16"
    )
    methods: MethodsFile = None


def experiment(
    passages: Passages,
    recordings: Recordings,
    compared: Compared,
    plot: Picture = None,
    progress_dir: Annotated[
        Path, typer.Option("--checkpoint-dir", help="folder for intermediate results, used to continue a killed run")
    ] = Path("build/methods"),
) -> Outcome:
    """Every method's bytes, error, rank and modelled time on recorded q, k, v."""
    methods = load_methods(compared.methods)
    tried = trials(chosen(compared.method, contenders(methods)), numbers("compression", compared.compression, float))
    check_picture(plot)
    written = recordings.read()
    layers = recordings.layers(written, passages)
    parts = sum(map(len, layers.values()))
    files = [*sorted(recordings.folder.glob("*.safetensors")), *([compared.methods] if compared.methods else [])]
    cache = ResultCache(progress_dir / f"{fingerprint([written, recordings.seed, asdict(passages)], files)}.jsonl")
    with progress("layers", len(tried) * parts) as tick:
        result = bench_methods(layers, tried, methods, tick, cache)
    cache.close()
    rows: list[Row] = result["methods"]
    if plot:
        save_figure(errors_over_bytes(means(rows, {t.contender.name for t in tried if t.contender.ideal})), plot)
    where = {"model": None if recordings.scenarios else recordings.folder.name, "text": ", ".join(layers)}
    beyond = sorted({row["name"] for row in rows if not row["within_budget"]})
    notes = [f"rows beyond their budget: {', '.join(beyond)}"] if beyond else []
    shown = [_by_text(rows)] if len(layers) > 1 else [_shown(result), _by_layer(result)]
    return Outcome(where | result, shown, notes)


def _recorded(model: Path, written: Mapping[str, str], passages: Passages) -> Texts:
    """Layers of a model on each text; raises ValueError with a text's name if it is too short."""
    with status("loading the model"):
        loaded, tokenizer = load(model)
    layers = {}
    with progress("passages recorded", passages.sequences * len(written)) as tick:
        for name, text in written.items():
            try:
                layers[name] = record_layers(loaded, tokenizer, text, passages, tick)
            except ValueError as error:
                raise ValueError(f"{name}: {error}" if len(written) > 1 else str(error)) from error
    return layers


def _generated(passages: Passages, seed: int) -> Texts:
    if passages.tokens < 256:  # scattered and repeated tokens need room
        raise ValueError(f"tokens = {passages.tokens}: scenarios need at least 256")
    return {name: [scenario(name, passages.tokens, passages.steps, seed)] for name in SCENARIOS}


def _shown(result: dict[str, Any]) -> Any:
    """A table of one text: the methods within their budgets."""
    rows = []
    for row in result["methods"]:
        if not row["within_budget"]:
            continue
        shares = (row["budget"], row["bytes_fetched_share"], row["bytes_useful_share"])
        errors = (row[f"output_rel_error{suffix}"] for suffix in ("", "_p99", "_worst"))
        times = (f"{row[name]:,.0f}" if name in row else "-" for name in ("serial_us", "overlapped_us"))
        figures = [f"{figure:.3f}" for figure in (*shares, *errors, row["mass_recall"])]
        rows.append((label(row), *figures, _place(row["rank"]), _place(row["rank_on_drives"]), *times))
    size = f"{result['sequences']} x {result['tokens']} + {result['steps']} tokens, {len(result['layers'])} layers"
    columns = ("method", "budget", "fetched", "useful", "error", "p99", "worst", "mass", "rank", "on drives")
    title = f"Methods, {size}; ranks at equal bytes; times of a layer's step on one drive"
    return table(title, (*columns, "serial us", "overlapped us"), rows)


def _place(rank: int | None) -> str:
    return "-" if rank is None else str(rank)


def _by_layer(result: dict[str, Any]) -> Any:
    """A table of the error in each layer, of the rows within their budgets."""
    layers, rows = [str(number) for number in result["layers"]], []
    for i, row in enumerate(result["methods"]):
        parts = result["by_layer"][i * len(layers) : (i + 1) * len(layers)]
        if row["within_budget"] and not row["name"].startswith("dense"):
            rows.append((label(row), f"{row['budget']:.3f}", *(f"{part['output_rel_error']:.2f}" for part in parts)))
    return table("Error by layer", ("method", "budget", *layers), rows)


def _by_text(rows: Sequence[Row]) -> Any:
    """A table of several texts: the error on each; a star marks rows beyond their budgets."""
    names = list(dict.fromkeys(row["text"] for row in rows))
    count, lines = len(rows) // len(names), []
    for of_trial in (rows[first::count] for first in range(count)):
        budget = f"{of_trial[0]['budget']:.3f}"
        errors = (f"{row[ERROR]:.2g}{'' if row['within_budget'] else '*'}" for row in of_trial)
        ranks = [row["rank"] for row in of_trial if row["rank"]]
        lines.append((label(of_trial[0]), budget, *errors, f"{min(ranks)} to {max(ranks)}" if ranks else "-"))
    return table("Error by text; *: more bytes than its budget", ("method", "budget", *names, "ranks"), lines)
