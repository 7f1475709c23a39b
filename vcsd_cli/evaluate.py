"""`vcsd eval`: what methods and drives are worth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from attention_engine import load_methods
from vcsd_cli.shared import MethodsOption, Output, OutputOption, err, numbers, progress, stdout

evaluate = typer.Typer(help="Measure what methods and drives are worth.")


@evaluate.callback()
def root() -> None:
    """Measure what methods and drives are worth."""


@evaluate.command("selectors")
def selectors(
    text: Annotated[Path | None, typer.Option(help="text to record q, k and v on (default: from Coriolanus)")] = None,
    model: Annotated[Path | None, typer.Option(help="folder of a decoder (default: the shipped one)")] = None,
    tokens: Annotated[int, typer.Option(min=64, help="prompt length")] = 1536,
    steps: Annotated[int, typer.Option(min=1, help="decode steps")] = 8,
    sequences: Annotated[int, typer.Option(min=1, help="passages of the text")] = 4,
    compression: Annotated[
        str, typer.Option(help="budgets 1/C in the bytes convention, with commas")
    ] = "2,4,5.333,8,16",
    plot: Annotated[Path | None, typer.Option(help="picture to draw: png, svg or pdf")] = None,
    methods: MethodsOption = None,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Every method's bytes, error and modelled time on recorded q, k, v."""
    compressions = numbers("compression", compression, float)
    known = load_methods(methods)
    with err.status("loading the model"):
        from eval.accuracy.selectors import TEXT, bench_selectors, contenders, plot_selectors
        from eval.plot import check_format
        from vcsd.generate import CHECKPOINT, load

        if plot:
            check_format(plot)
        loaded, tokenizer = load(model or CHECKPOINT)
        written = (text or TEXT).read_text(encoding="utf-8")
    turns = (len(contenders(known)) - 1) * len(compressions) + 1
    with progress("layers", turns * loaded.config.num_hidden_layers) as tick:
        result = bench_selectors(loaded, tokenizer, written, tokens, steps, sequences, compressions, tick, known)
    if plot:
        plot_selectors(result, plot)
    if output is Output.JSON:
        print(json.dumps(result))
        return
    title = f"Selectors, {sequences} x {tokens} + {steps} tokens, times of a layer's step on one drive"
    table = Table(title=title, title_justify="left")
    table.add_column("method", no_wrap=True)
    for column in ("budget", "fetched", "useful", "error", "mass", "serial us", "overlapped us"):
        table.add_column(column, justify="right")
    for row in result["methods"]:
        shares = (row["budget"], row["bytes_fetched_share"], row["bytes_useful_share"])
        figures = *(f"{share:.3f}" for share in shares), f"{row['output_rel_error']:.4f}", f"{row['mass_recall']:.4f}"
        table.add_row(row["name"], *figures, f"{row['serial_us']:,.0f}", f"{row['overlapped_us']:,.0f}")
    stdout().print(table)
    names = sorted({row["name"] for row in result["beyond_budget"]})
    if names:
        err.print(f"rows beyond their budget are in the json only: {', '.join(names)}")
