"""Tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str] = ()) -> Table:
    """A table; the columns named in `left`, or the first, are text, the others figures."""
    made = Table(title=title, title_justify="left")
    for column in columns:
        text = column in (left or columns[:1])
        made.add_column(column, justify="left" if text else "right", no_wrap=text and not left)
    for row in rows:
        made.add_row(*row)
    return made


def flat_table(title: str, result: dict[str, Any]) -> Table:
    """A flat result."""
    rows = ((name, f"{each:,.4g}" if isinstance(each, float) else str(each)) for name, each in result.items())
    return table(title, ("what", "figure"), rows)
