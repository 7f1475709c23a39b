"""A model's score by method and compression: the command's options, its table and its picture."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from attention_engine import load_methods
from vcsd.options import MethodsFile, ModelFolder
from vcsd.progress import progress, status
from vcsd.tables import table
from vcsd_eval.accuracy.plan import AccuracyOptions, ConventionChoice, MeasurementPlan, contenders, default_samples
from vcsd_eval.experiment import Outcome
from vcsd_eval.options import Drives, Picture, check_picture, numbers
from vcsd_eval.plot import new_figure, save_figure


@dataclass(frozen=True, slots=True)
class Field:
    """The compared methods."""

    method: Annotated[str, typer.Option(help="comma-separated methods; ours uses its own budget")] = (
        "dense,sparf,h2o,quest,ours"
    )
    compression: Annotated[str, typer.Option(help="comma-separated values C of the budget 1/C of the KV data")] = "8"
    convention: Annotated[
        ConventionChoice,
        typer.Option(
            "--budget-convention", help="bytes: k = S/2C; paper: k = S/C; both: sparf in both, other methods in bytes"
        ),
    ] = "both"
    methods: MethodsFile = None


def experiment(
    question: AccuracyOptions,
    field: Field,
    model: ModelFolder = None,
    drives: Drives = 2,
    progress_dir: Annotated[
        Path, typer.Option("--checkpoint-dir", help="folder for intermediate results, used to continue a killed run")
    ] = Path("build/accuracy"),
    plot: Picture = None,
) -> Outcome:
    """A model's score with its decode attention in drives, by method and compression, with 95 % intervals."""
    chosen = tuple(contenders(field.method, load_methods(field.methods)))
    compressions = numbers("compression", field.compression, float)
    samples = question.samples or default_samples(question.task)
    check_picture(plot)
    with status("loading the model"):
        from host_driver.hf.shape import placement
        from host_driver.sharding import assign_heads
        from vcsd.loading import CHECKPOINT, load
        from vcsd_eval.accuracy.measure import BATCH, measure_accuracy

        loaded, tokenizer = load(model or CHECKPOINT)
        assign_heads(placement(loaded).shape, drives)
        limit = getattr(loaded.config.get_text_config(decoder=True), "max_position_embeddings", 2048)
    sizes = {"samples": samples, "max_context": question.max_context or min(2048, limit)}
    plan = MeasurementPlan(
        **asdict(question) | sizes,
        methods=chosen,
        compressions=tuple(compressions),
        convention=field.convention,
        drives=drives,
        own_methods=field.methods,
    )
    with progress("methods x compressions x batches", -(-samples // BATCH) * len(plan.trials())) as tick:
        result = measure_accuracy(loaded, tokenizer, plan, progress_dir, tick)
    if plot:
        save_figure(scores_over_compression(result), plot)
    return Outcome(result, [_shown(result)])


def _shown(result: dict[str, Any]) -> Any:
    """A table of all rows."""
    rows = []
    for row in result["rows"]:
        shares = f"{row['bytes_share']:.3f}", f"{row['pages_share']:.3f}"
        figure = row["metric"], f"{row['value']:.4g}", _interval(row["ci_low"], row["ci_high"])
        difference = "", ""
        if "difference" in row:
            difference = f"{row['difference']:+.3g}", _interval(row["difference_low"], row["difference_high"])
        counted = f"{row['compression']:g} ({row['convention']})"
        rows.append((row["method"], counted, *shares, *figure, *difference))
    title = f"{result['task']}, {result['samples']} samples ({result['rows'][0]['rule']})"
    if "reference_bits_per_byte" in result:
        title += f", {result['reference_bits_per_byte']:.4f} bits a byte by transformers"
    columns = ("method", "1/c", "used", "fetched", "figure", "value", "95 %", "minus dense", "95 %")
    return table(title, columns, rows, left=("method", "1/c", "figure"))


def _interval(low: float, high: float) -> str:
    return f"{low:.4g} to {high:.4g}"


def scores_over_compression(result: dict[str, Any]) -> Any:
    """A figure of the task's first figure over the compression, with its interval, a line for each method."""
    figure, axes = new_figure()
    metric = result["rows"][0]["metric"]
    shown = [row for row in result["rows"] if row["metric"] == metric]
    for name in dict.fromkeys(_line(row) for row in shown):
        rows = [row for row in shown if _line(row) == name]
        x = [row["compression"] for row in rows]
        y = [row["value"] for row in rows]
        if name == "dense":
            axes.axhline(y[0], color="black", linewidth=0.8, label=name)
            continue
        spread = [
            [v - row["ci_low"] for v, row in zip(y, rows, strict=True)],
            [row["ci_high"] - v for v, row in zip(y, rows, strict=True)],
        ]
        axes.errorbar(x, y, yerr=np.maximum(spread, 0), marker="o", markersize=3, capsize=2, linewidth=1, label=name)
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="compression",
        ylabel=metric.replace("_", " "),
        title=f"{result['task']}, {result['samples']} samples",
    )
    axes.legend(fontsize=7)
    return figure


def _line(row: dict[str, Any]) -> str:
    """The label of a row's line: its method, and the convention unless that is bytes."""
    method: str = row["method"]
    return method if row["convention"] == "bytes" or method == "dense" else f"{method} ({row['convention']})"
