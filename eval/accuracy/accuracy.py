"""A model's score by method and compression: what is asked, and how it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from attention_engine import load_methods
from csd_spec.sparf import Convention
from eval.experiment import Outcome
from eval.options import Drives, Picture, check_picture, numbers
from eval.plot import new_figure, save_figure
from vcsd.options import MAX_SEED, MethodsFile, ModelFolder
from vcsd.progress import progress, status
from vcsd.tables import table


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked."""

    task: Annotated[str, typer.Option(help="squad, sharegpt, wikitext, triviaqa, repetition or passkey")]
    data: Annotated[Path | None, typer.Option(help="the task's file, as it is published (passkey needs none)")] = None
    samples: Annotated[int, typer.Option(min=1, max=1 << 20, help="how many, if the file has as many")] = 8
    max_context: Annotated[
        int | None, typer.Option(min=1, max=1 << 20, help="tokens at most (default: the model's, at most 4096)")
    ] = None
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="of the samples and of the intervals")] = 0


@dataclass(frozen=True, slots=True)
class Field:
    """Who takes part."""

    method: Annotated[str, typer.Option(help="with commas; ours comes at its own budget")] = (
        "dense,sparf,sparq,h2o,local,quest,ours"
    )
    compression: Annotated[str, typer.Option(help="C of 1/C of K and V, with commas")] = "1,2,4,8,16,32"
    convention: Annotated[Convention, typer.Option(help="bytes: k = S/2C, for comparing methods; paper: k = S/C")] = (
        "bytes"
    )
    methods: MethodsFile = None


def experiment(
    question: Question,
    field: Field,
    model: ModelFolder = None,
    drives: Drives = 2,
    progress_dir: Annotated[Path, typer.Option(help="where a killed run leaves what it has measured")] = Path(
        "build/accuracy"
    ),
    plot: Picture = None,
) -> Outcome:
    """A model's score with its decode attention in drives, by method and compression, with 95 % intervals."""
    known = load_methods(field.methods)
    compressions = numbers("compression", field.compression, float)
    check_picture(plot)
    with status("loading the model"):
        from eval.accuracy.measure import BATCH, measure_accuracy
        from eval.accuracy.plan import Plan, contenders
        from host_driver.hf.shape import placement
        from host_driver.sharding import share_out
        from vcsd.loading import CHECKPOINT, load

        chosen = tuple(contenders(field.method.split(","), known))
        loaded, tokenizer = load(model or CHECKPOINT)
        share_out(placement(loaded).shape, drives)
        limit = getattr(loaded.config.get_text_config(decoder=True), "max_position_embeddings", 4096)
        plan = Plan(
            task=question.task,
            data=question.data,
            methods=chosen,
            compressions=tuple(compressions),
            convention=field.convention,
            samples=question.samples,
            drives=drives,
            max_context=min(4096, limit) if question.max_context is None else question.max_context,
            seed=question.seed,
            own_methods=field.methods,
        )
    with progress("methods x compressions x batches", -(-question.samples // BATCH) * len(plan.turns())) as tick:
        result = measure_accuracy(loaded, tokenizer, plan, progress_dir, tick)
    if plot:
        save_figure(scores_over_compression(result), plot)
    return Outcome(result, [_shown(result)])


def _shown(result: dict[str, Any]) -> Any:
    """A table of all rows."""
    rows = []
    for row in result["rows"]:
        shares = f"{row['bytes_share']:.3f}", f"{row['pages_share']:.3f}"
        interval = f"{row['ci_low']:.4g} to {row['ci_high']:.4g}"
        figure = row["metric"], f"{row['value']:.4g}", interval
        rows.append((row["method"], f"{row['compression']:g}", *shares, *figure))
    first = result["rows"][0]
    counted = f"compression counts {first['convention']}"
    title = f"{result['task']}, {result['samples']} samples ({first['rule']}), {counted}"
    columns = ("method", "1/c", "used", "fetched", "figure", "value", "95 %")
    return table(title, columns, rows, left=("method", "figure"))


def scores_over_compression(result: dict[str, Any]) -> Any:
    """A figure of the task's first figure over the compression, with its interval, a line for each method."""
    figure, axes = new_figure()
    metric = result["rows"][0]["metric"]
    for name in dict.fromkeys(row["method"] for row in result["rows"]):
        rows = [row for row in result["rows"] if (row["method"], row["metric"]) == (name, metric)]
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
        xlabel=f"compression ({result['rows'][0]['convention']})",
        ylabel=metric.replace("_", " "),
        title=f"{result['task']}, {result['samples']} samples",
    )
    axes.legend(fontsize=7)
    return figure
