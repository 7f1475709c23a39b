"""Options that several experiments have, and lists of numbers as options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from csd_io.medium import Kind
from vcsd_eval.plot import check_format

MAX_NUMBER = 1 << 20  # limit of each number in a list: batch sizes, drives, compressions
Picture = Annotated[Path | None, typer.Option(help="picture to draw: png, svg or pdf")]
Drives = Annotated[int, typer.Option(min=1, max=1024, help="virtual drives that share the heads")]

RayAddress = Annotated[str | None, typer.Option(help="run on a Ray cluster instead: auto, local, ray://HOST:PORT")]
MediumOption = Annotated[Kind, typer.Option(help="where flash pages are: memory, or files of a temporary folder")]


def numbers(name: str, text: str, kind: type = int) -> list[Any]:
    """An option's numbers with commas between them, each at least 1."""
    try:
        values = [kind(number) for number in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{name} = {text!r}: needs numbers with commas between them") from error
    if not all(1 <= number <= MAX_NUMBER for number in values):
        raise ValueError(f"{name} = {text!r}: each must be at least 1, and at most {MAX_NUMBER:,}")
    return values


def number(name: str, text: str) -> int:
    """An option that could be numbers and is one."""
    first, *others = numbers(name, text)
    if others:
        raise ValueError(f"{name} = {text!r}: this figure is of one")
    return int(first)


def check_picture(plot: Path | None) -> None:
    """Raise ValueError for a file that no picture can go to, before the work is done."""
    if plot:
        check_format(plot)
