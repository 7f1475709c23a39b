"""`vcsd eval accuracy` and `vcsd eval oracle`: what attention in drives does to a model's work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from attention_engine import load_methods
from vcsd_cli.evaluate import evaluate
from vcsd_cli.run import ConventionName
from vcsd_cli.shared import MethodsOption, Output, OutputOption, err, numbers, progress, show, stdout

__all__ = ["evaluate"]

ModelOption = Annotated[Path | None, typer.Option(help="folder of a decoder (default: the shipped one)")]


@evaluate.command("accuracy")
def accuracy(
    task: Annotated[str, typer.Option(help="squad, sharegpt, wikitext, triviaqa, repetition or passkey")],
    data: Annotated[Path | None, typer.Option(help="the task's file, as it is published (passkey needs none)")] = None,
    model: ModelOption = None,
    method: Annotated[
        str, typer.Option(help="with commas; ours: scores from a 4-bit copy of K (ours-int4)")
    ] = "dense,sparf,sparq,h2o,local,quest,ours",
    compression: Annotated[str, typer.Option(help="C of 1/C of K and V, with commas")] = "1,2,4,8,16,32",
    convention: Annotated[
        ConventionName, typer.Option(help="bytes: k = S/2C, for comparing methods; paper: k = S/C")
    ] = ConventionName.BYTES,
    samples: Annotated[int, typer.Option(min=1, help="how many, if the file has as many")] = 8,
    drives: Annotated[int, typer.Option(min=1, help="virtual drives that share the KV heads")] = 2,
    max_context: Annotated[int | None, typer.Option(help="tokens at most (default: the model's, at most 4096)")] = None,
    seed: Annotated[int, typer.Option(help="of the samples and of the intervals")] = 0,
    progress_dir: Annotated[Path, typer.Option(help="where a killed run leaves what it has measured")] = Path(
        "build/accuracy"
    ),
    plot: Annotated[Path | None, typer.Option(help="picture to draw: png, svg or pdf")] = None,
    methods: MethodsOption = None,
    output: OutputOption = Output.NORMAL,
) -> None:
    """A model's score with its decode attention in drives, by method and compression, with 95 % intervals."""
    known = load_methods(methods)
    compressions = numbers("compression", compression, float)
    with err.status("loading the model"):
        from eval.accuracy.measure import BATCH, Plan, contenders, measure_accuracy, plot_accuracy
        from eval.plot import check_format
        from host_driver.hf.cache import model_shape
        from host_driver.sharding import split_heads
        from vcsd.generate import CHECKPOINT, load

        if plot:
            check_format(plot)
        chosen = tuple(contenders(method.split(","), known))
        loaded, tokenizer = load(model or CHECKPOINT)
        split_heads(model_shape(loaded).kv_heads, drives)
        limit = getattr(loaded.config.get_text_config(decoder=True), "max_position_embeddings", 4096)
        plan = Plan(
            task, data, chosen, tuple(compressions), convention.value, samples, drives,
            min(4096, limit) if max_context is None else max_context, seed, methods,
        )  # fmt: skip
    batches = -(-samples // BATCH)
    with progress("methods x compressions x batches", batches * len(plan.turns())) as tick:
        result = measure_accuracy(loaded, tokenizer, plan, progress_dir, tick)
    if plot:
        plot_accuracy(result, plot)
    if output is Output.JSON:
        print(json.dumps(result))
        return
    title = f"{task}, {result['samples']} samples ({result['rows'][0]['rule']}), compression counts {convention.value}"
    table = Table(title=title, title_justify="left")
    table.add_column("method", no_wrap=True)
    for column in ("1/c", "used", "fetched"):
        table.add_column(column, justify="right")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("95 %", justify="right", no_wrap=True)
    for row in result["rows"]:
        shares = f"{row['bytes_share']:.3f}", f"{row['pages_share']:.3f}"
        interval = f"{row['ci_low']:.4g} to {row['ci_high']:.4g}"
        table.add_row(row["method"], f"{row['compression']:g}", *shares, row["metric"], f"{row['value']:.4g}", interval)
    stdout().print(table)


@evaluate.command("oracle")
def oracle(
    text: Annotated[Path | None, typer.Option(help="text to record q, k and v on (default: from Coriolanus)")] = None,
    model: ModelOption = None,
    tokens: Annotated[int, typer.Option(min=64, help="tokens before the first step")] = 1024,
    steps: Annotated[int, typer.Option(min=1, help="decode steps")] = 1000,
    compression: Annotated[float, typer.Option(help="C of 1/C of K and V")] = 8,
    output: OutputOption = Output.NORMAL,
) -> None:
    """SparF's choice of tokens in every layer and head of recorded decode steps, against float64 Algorithm 1."""
    with err.status("loading the model"):
        from csd_spec import Compression
        from eval.accuracy.choices import compare_choices
        from eval.accuracy.selectors import TEXT
        from vcsd.generate import CHECKPOINT, load

        Compression(compression)
        loaded, tokenizer = load(model or CHECKPOINT)
        written = (text or TEXT).read_text(encoding="utf-8")
    with progress("layers", loaded.config.num_hidden_layers) as tick:
        result = compare_choices(loaded, tokenizer, written, tokens, steps, compression, tick)
    show("SparF's choice of tokens against the oracle", result, output)
