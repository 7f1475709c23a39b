"""What commands have in common: options and how results are printed."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console

from vcsd.progress import err
from vcsd.tables import flat_table

__all__ = [
    "ATTENTION_HELP",
    "Output",
    "OutputLetterOption",
    "OutputOption",
    "err",
    "importing",
    "print_json",
    "show",
    "stdout",
]

ATTENTION_HELP = "how drives attend: dense, sparf, or another method of attention_engine (see docs/methods.md)"


@contextmanager
def importing() -> Iterator[None]:
    """Nothing is collected meanwhile: what is imported stays, and looking for garbage in it would take a tenth of the
    time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def stdout() -> Console:
    """For results: as wide as the terminal, or wide enough for a table where there is none."""
    return Console(width=None if sys.stdout.isatty() else 120, emoji=False)


class Output(StrEnum):
    """How a result is printed."""

    NORMAL = "normal"
    JSON = "json"


_OUTPUT_HELP = "normal: for people; json: for programs"
OutputOption = Annotated[Output, typer.Option("-o", "--output", help=_OUTPUT_HELP)]
OutputLetterOption = Annotated[Output, typer.Option("-o", help=_OUTPUT_HELP)]  # where --output says something else


def show(title: str, result: dict[str, Any], output: Output) -> None:
    """A flat result as a table or as json."""
    if output is Output.JSON:
        print_json(result)
    else:
        stdout().print(flat_table(title, result))


def print_json(result: object) -> None:
    """A result for programs."""
    print(json.dumps(result))
