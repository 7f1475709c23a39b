"""Common options of commands, and printing of results."""

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
    "OutputOption",
    "err",
    "importing",
    "print_json",
    "report_done",
    "show",
    "stdout",
]

ATTENTION_HELP = "attention method: dense, sparf or another one (see docs/methods.md)"


@contextmanager
def importing() -> Iterator[None]:
    """Disable the garbage collector during imports: it would take a tenth of the time and free nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


WIDEST = 10_000  # limit of a table's width, characters


class Results(Console):
    """Standard output for results.

    No figure of a table is cut. Without a terminal, tables are tab-separated and lines are not wrapped.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        for part in chain.from_iterable(map(parts, objects)):
            if not isinstance(part, Table):
                super().print(part, soft_wrap=not self.is_terminal, **options)
            elif self.is_terminal:  # the terminal wraps lines that are too long; Rich would cut figures
                width = self.width
                least = Measurement.get(self, self.options.update(width=WIDEST), part).minimum
                self.width = max(width, least + len(part.columns))  # Rich rounds widths of columns down
                super().print(part, **options)
                self.width = width
            else:
                self.file.write(f"{tab_separated(part)}\n")  # Rich would expand tabs


def stdout() -> Console:
    """Standard output for results."""
    return Results(emoji=False)


class Output(StrEnum):
    """Format of a result."""

    NORMAL = "normal"
    JSON = "json"


OutputOption = Annotated[Output, typer.Option("-o", "--output-format", help="output format: table (normal) or json")]


def show(title: str, result: dict[str, Any], output: Output) -> None:
    """Print a flat result as a table or as JSON."""
    if output is Output.JSON:
        print_json(result)
    else:
        stdout().print(flat_table(title, result))


def report_done(text: str, result: dict[str, Any], output: Output) -> None:
    """Report a command whose result is a change: a line on stderr, or JSON."""
    if output is Output.JSON:
        print_json(result)
    else:
        err.print(text)


def print_json(result: object) -> None:
    """Print a result as JSON."""
    print(json.dumps(result))
