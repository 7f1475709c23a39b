"""What commands have in common: options, tables, progress."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

err = Console(stderr=True)
ATTENTION_HELP = "how drives attend: dense, sparf, or another method of attention_engine (see docs/methods.md)"


def stdout() -> Console:
    """For results: as wide as the terminal, or wide enough for a table where there is none."""
    return Console(width=None if sys.stdout.isatty() else 120)


class Output(StrEnum):
    """How a result is printed."""

    NORMAL = "normal"
    JSON = "json"


OutputOption = Annotated[Output, typer.Option("-o", "--output", help="normal: for people; json: for programs")]


MethodsOption = Annotated[Path | None, typer.Option("--methods", help="Python file with methods of your own")]


def numbers(name: str, text: str, kind: type = int) -> list[Any]:
    """An option's numbers with commas between them, each at least 1."""
    try:
        found = [kind(each) for each in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{name} = {text!r}: needs numbers with commas between them") from error
    if min(found) < 1:
        raise ValueError(f"{name} = {text!r}: must be at least 1")
    return found


def show(title: str, result: dict[str, Any], output: Output) -> None:
    """A flat result as a table or as json."""
    if output is Output.JSON:
        print(json.dumps(result))
        return
    table = Table(title=title, title_justify="left")
    table.add_column("what")
    table.add_column("figure", justify="right")
    for name, value in result.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else str(value))
    stdout().print(table)


def print_json(result: object) -> None:
    """A result for programs."""
    print(json.dumps(result))


class progress:  # noqa: N801 - used as a function
    """A progress bar on stderr that appears with the first tick; nothing when that is no terminal."""

    def __init__(self, what: str, total: int) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self.bar = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
        self.task = self.bar.add_task(what, total=total)

    def __enter__(self) -> Any:
        return self._tick

    def _tick(self, _: Any) -> None:
        if not self.bar.live.is_started:
            if sys.stdout.isatty():
                print(flush=True)
            self.bar.start()
        self.bar.advance(self.task)

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
