"""`vcsd model convert`: converts models of other programs to folders for `--model`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vcsd.progress import status
from vcsd_cli.shared import Output, OutputOption, show

convert = typer.Typer(help="Convert models of other programs to folders for --model.")


@convert.callback()
def root() -> None:
    """Convert models of other programs to folders for --model."""


@convert.command("gguf")
def gguf(
    model: Annotated[Path, typer.Argument(help="GGUF file of an architecture that transformers supports")],
    out: Annotated[Path, typer.Argument(help="folder to create")],
    output: OutputOption = Output.NORMAL,
) -> None:
    """Convert a GGUF file (llama.cpp); quantized weights are dequantized."""
    with status("converting, a minute or two"):
        from vcsd.gguf import convert_gguf

        shape = convert_gguf(model, out)
    show(f"Written to {out}", shape, output)


@convert.command("llama2c")
def llama2c(
    model: Annotated[Path, typer.Argument(help="llama2.c model, e.g. stories260K.bin")],
    tokenizer: Annotated[Path, typer.Argument(help="tokenizer of the model, e.g. tok512.bin")],
    out: Annotated[Path, typer.Argument(help="folder to create")],
    output: OutputOption = Output.NORMAL,
) -> None:
    """Convert a llama2.c model and its tokenizer."""
    if out.exists():
        raise ValueError(f"{out} exists already: choose another folder")
    with status("converting"):
        from vcsd_eval.model.llama2c import convert_model

        shape = convert_model(model, tokenizer, out)
    show(f"Written to {out}", shape, output)
