"""What commands have in common: options and how results are printed."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from itertools import chain
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from vcsd.progress import err
from vcsd.tables import flat_table, parts, tab_separated

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


WIDEST = 10_000  # characters of a table


class Results(Console):
    """Standard output for results.

    No figure of a table is cut. Without a terminal tables are tab-separated, and lines are not wrapped.
    """

    def print(self, *objects: Any, **given: Any) -> None:
        for each in chain.from_iterable(map(parts, objects)):
            if not isinstance(each, Table):
                super().print(each, soft_wrap=not self.is_terminal, **given)
            elif self.is_terminal:  # which wraps lines that are too long; Rich would cut figures
                width = self.width
                least = Measurement.get(self, self.options.update(width=WIDEST), each).minimum
                self.width = max(width, least + len(each.columns))  # Rich rounds widths of columns down
                super().print(each, **given)
                self.width = width
            else:
                self.file.write(f"{tab_separated(each)}\n")  # Rich would expand tabs


def stdout() -> Console:
    """Standard output for results."""
    return Results(emoji=False)


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
