"""What an experiment is: a module with a function `experiment`, whose arguments are its options and whose value is an
`Outcome`.

The arguments carry `typer.Option` in their annotations; one that is a frozen dataclass stands for an option for each of
its fields, so that experiments can share a list of options. `vcsd_cli.experiments` has a line for each experiment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an experiment has found.

    result: for programs. shown: tables and lines for people. notes: what they may want to know besides. failed: whether
    something was found that must not be.
    """

    result: dict[str, Any]
    shown: Sequence[Any] = ()
    notes: Sequence[str] = ()
    failed: bool = False


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str] = ()) -> Table:
    """A table for people; the columns named in `left`, or the first, are text, the others figures."""
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


def flat(title: str, result: dict[str, Any], failed: bool = False) -> Outcome:
    """An outcome that is a flat result."""
    return Outcome(result, [flat_table(title, result)], failed=failed)
