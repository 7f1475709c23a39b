"""Tables for terminal output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str] = ()) -> Table:
    """Create a table; the columns in `left` (default: the first) are text, the others figures."""
    grid = Table(title=title, title_justify="left")
    for column in columns:
        text = column in (left or columns[:1])
        grid.add_column(column, justify="left" if text else "right", no_wrap=not text or not left)
    for row in rows:
        grid.add_row(*row)
    return grid


def parts(shown: Any) -> Iterator[Any]:
    """Tables and lines that a Rich renderable consists of."""
    if hasattr(shown, "__rich__"):
        shown = shown.__rich__()
    if isinstance(shown, Group):
        for renderable in shown.renderables:
            yield from parts(renderable)
    else:
        yield shown


def tab_separated(shown: Table) -> str:
    """A table as tab-separated lines: title, column names, rows."""
    lines = [_plain(shown.title)] if shown.title else []
    lines.append("\t".join(_plain(column.header) for column in shown.columns))
    lines += ["\t".join(map(_plain, row)) for row in zip(*(column.cells for column in shown.columns), strict=True)]
    return "\n".join(lines)


def _plain(cell: Any) -> str:
    text = Text.from_markup(cell) if isinstance(cell, str) else cell
    return " ".join(str(text).split())


def flat_table(title: str, result: dict[str, Any]) -> Table:
    """Table of a flat dictionary."""
    rows = ((name, f"{figure:,.4g}" if isinstance(figure, float) else str(figure)) for name, figure in result.items())
    return table(title, ("what", "figure"), rows)


class Printable(ABC):
    """A result whose text is its tables, at most 80 characters wide."""

    __slots__ = ()

    @abstractmethod
    def tables(self) -> Group:
        """The tables."""

    def __rich__(self) -> Group:
        return self.tables()

    def __str__(self) -> str:
        console = Console(width=80, no_color=True, emoji=False)
        with console.capture() as capture:
            console.print(self.tables())
        return capture.get().rstrip()
