"""Bytes, error and modelled time of each attention method on recorded q, k and v."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from attention_engine import METHODS, Methods, load_methods
from vcsd.loading import CHECKPOINT, load
from vcsd.options import MethodsFile, ModelFolder
from vcsd.progress import Tick, no_tick, progress, status
from vcsd.tables import table
from vcsd_eval.accuracy import texts
from vcsd_eval.accuracy.compared_methods import OURS_BEGIN, Contender, Trial, contenders, trials
from vcsd_eval.accuracy.errors import Row, label, measured
from vcsd_eval.accuracy.layers import Layer, Passages, gaussian, record_layers
from vcsd_eval.accuracy.recorded import TEXT
from vcsd_eval.experiment import Outcome
from vcsd_eval.options import Picture, check_picture, numbers
from vcsd_eval.partial_results import ResultCache, fingerprint
from vcsd_eval.plot import new_figure, save_figure

PROGRESS = Path("build/selectors")


def chosen(names: str | None, known: list[Contender]) -> list[Contender]:
    """Contenders by names with commas between them; raises ValueError for an unknown name."""
    table_of = {each.name: each for each in known}
    if names is None:
        return known
    wanted = dict.fromkeys(names.split(","))
    if unknown := [name for name in wanted if name not in table_of]:
        raise ValueError(f"method = {unknown[0]!r}: must be one of {', '.join(sorted(table_of))}")
    return [table_of[name] for name in wanted]


def bench_selectors(
    layers: list[Layer],
    tried: Sequence[Trial],
    methods: Methods = METHODS,
    tick: Tick = no_tick,
    kept: ResultCache | None = None,
) -> dict[str, Any]:
    """Every trial on the decode steps of some layers; columns: `measured`. `methods` has a row for each trial,
    `by_layer` one for each of its layers."""
    done = kept or ResultCache(None)
    rows: list[Row] = []
    by_layer: list[Row] = []
    for trial in tried:
        whole, each = done.get(repr(trial), partial(measured, trial, layers, methods, tick))
        rows.append(whole)
        by_layer += each
    return {
        "tokens": layers[0].tokens,
        "steps": layers[0].steps,
        "sequences": len(layers[0].recorded.q),
        "layers": [layer.number for layer in layers],
        "methods": rows,
        "by_layer": by_layer,
    }


def errors_over_bytes(result: dict[str, Any]) -> Any:
    """A figure of the error over the bytes fetched, a line for each method."""
    figure, axes = new_figure(width=11, height=7)
    shown = [row for row in result["methods"] if row["within_budget"] and row["name"] != "dense"]
    for name in dict.fromkeys(label(row) for row in shown):
        rows = [row for row in shown if label(row) == name]
        shares, errors = [row["bytes_fetched_share"] for row in rows], [row["output_rel_error"] for row in rows]
        axes.plot(shares, errors, "o-" if name.startswith(OURS_BEGIN) else "x--", label=name, markersize=4, linewidth=1)
    axes.set(
        xscale="log", yscale="log", xlabel="bytes fetched / bytes of K and V", ylabel="relative error of the output"
    )
    axes.legend(fontsize=6, ncols=2, loc="upper left", bbox_to_anchor=(1.01, 1))
    return figure


def experiment(
    passages: Passages,
    text: texts.SourceText = None,
    model: ModelFolder = None,
    method: Annotated[str | None, typer.Option(help="comma-separated methods (default: all)")] = None,
    compression: Annotated[
        str, typer.Option(help="comma-separated values C of the budget 1/C, bytes convention")
    ] = "2,4,5.333,8,16",
    plot: Picture = None,
    methods: MethodsFile = None,
    random: Annotated[bool, typer.Option("--with-random-data", help="also measure random normal q, k and v")] = False,
    progress_dir: Annotated[
        Path, typer.Option("--checkpoint-dir", help="folder for intermediate results, used to continue a killed run")
    ] = PROGRESS,
) -> Outcome:
    """Every method's bytes, error and modelled time on recorded q, k, v."""
    compressions = numbers("compression", compression, float)
    known = load_methods(methods)
    tried = trials(chosen(method, contenders(known)), compressions)
    check_picture(plot)
    folder = model or CHECKPOINT
    with status("loading the model"):
        written = texts.read(text)
        loaded, tokenizer = load(folder)
    with progress("passages recorded", passages.sequences) as tick:
        layers = record_layers(loaded, tokenizer, written, passages, tick)
    del loaded
    kept = kept_results(progress_dir, [written, asdict(passages)], folder, methods)
    with progress("layers", len(tried) * len(layers) * (1 + random)) as tick:
        result = bench_selectors(layers, tried, known, tick, kept)
        others = bench_selectors(gaussian(layers), tried, known, tick) if random else None
    kept.close()
    if plot:
        save_figure(errors_over_bytes(result), plot)
    used = memory(layers)
    rows: list[Row] = result["methods"]
    result = {"model": folder.name, "text": str(text or TEXT.name), **used} | result
    shown = [_shown("Selectors", result), _by_layer(result)]
    beyond = sorted({row["name"] for row in rows if not row["within_budget"]})
    notes = [f"rows beyond their budget are in the json only: {', '.join(beyond)}"] if beyond else []
    notes.append(f"MB: {used['recorded_mb']:,.0f} of recorded q, k and v, {used['peak_mb']:,.0f} the most in use")
    if others is None:
        return Outcome(result, shown, notes)
    return Outcome(result | {"gaussian": others}, [*shown, _shown("Gaussian", others)], notes)


def kept_results(progress_dir: Path, parts: Sequence[object], model: Path, methods: Path | None) -> ResultCache:
    """Results of an earlier run with the same parts, weights and methods file that was killed."""
    files = [*sorted(model.glob("*.safetensors")), *([methods] if methods else [])]
    return ResultCache(progress_dir / f"{fingerprint(parts, files)}.jsonl")


def memory(layers: Sequence[Layer]) -> dict[str, float]:
    """Size of the recordings, and peak memory of this process, in 10^6 bytes."""
    recorded = sum(layer.recorded.nbytes for layer in layers)
    return {"recorded_mb": recorded / 1e6, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6}


def _shown(what: str, result: dict[str, Any]) -> Any:
    """A table of the methods within their budgets."""
    rows = []
    for row in result["methods"]:
        if not row["within_budget"]:
            continue
        shares = (row["budget"], row["bytes_fetched_share"], row["bytes_useful_share"])
        errors = (row[f"output_rel_error{suffix}"] for suffix in ("", "_p99", "_worst"))
        times = (f"{row[name]:,.0f}" if name in row else "-" for name in ("serial_us", "overlapped_us"))
        figures = [f"{figure:.3f}" for figure in (*shares, *errors, row["mass_recall"])]
        rows.append((label(row), *figures, *times))
    size = f"{result['sequences']} x {result['tokens']} + {result['steps']} tokens, {len(result['layers'])} layers"
    columns = ("method", "budget", "fetched", "useful", "error", "p99", "worst", "mass", "serial us", "overlapped us")
    return table(f"{what}, {size}, times of a layer's step on one drive", columns, rows)


def _by_layer(result: dict[str, Any]) -> Any:
    """A table of the error in each layer, of the rows within their budgets."""
    numbers_, rows = [str(number) for number in result["layers"]], []
    for i, row in enumerate(result["methods"]):
        mine = result["by_layer"][i * len(numbers_) : (i + 1) * len(numbers_)]
        if row["within_budget"] and not row["name"].startswith("dense"):
            rows.append((label(row), f"{row['budget']:.3f}", *(f"{part['output_rel_error']:.2f}" for part in mine)))
    return table("Error by layer", ("method", "budget", *numbers_), rows)
