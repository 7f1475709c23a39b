"""`vcsd convert`: models of other programs as folders that `--model` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vcsd.progress import status
from vcsd_cli.shared import Output, OutputOption, show

convert = typer.Typer(help="Turn models of other programs into folders that --model takes.")


@convert.callback()
def root() -> None:
    """Turn models of other programs into folders that --model takes."""


@convert.command("gguf")
def gguf(
    model: Annotated[Path, typer.Argument(help="GGUF file of an architecture that transformers reads")],
    out: Annotated[Path, typer.Argument(help="folder to write")],
    output: OutputOption = Output.NORMAL,
) -> None:
    """A GGUF file, llama.cpp's format; quantized weights become the values that they stand for."""
    with status("converting, a minute or two"):
        from vcsd.gguf import convert_gguf

        shape = convert_gguf(model, out)
    show(f"Written to {out}", shape, output)


@convert.command("llama2c")
def llama2c(
    model: Annotated[Path, typer.Argument(help="llama2.c's model, such as stories260K.bin")],
    tokenizer: Annotated[Path, typer.Argument(help="its tokenizer, such as tok512.bin")],
    out: Annotated[Path, typer.Argument(help="folder to write")],
    output: OutputOption = Output.NORMAL,
) -> None:
    """A llama2.c model and its tokenizer."""
    if out.exists():
        raise ValueError(f"{out} exists already")
    with status("converting"):
        from eval.model.llama2c import convert_model

        shape = convert_model(model, tokenizer, out)
    show(f"Written to {out}", shape, output)
