"""Definition of an experiment: a module with a function `experiment` that takes options and returns an `Outcome`.

The arguments carry `typer.Option` in their annotations. An argument that is a frozen dataclass stands for one option
per field, so that experiments can share a list of options. `vcsd_cli.experiments` has a line for each experiment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vcsd.tables import flat_table


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of an experiment.

    Attributes:
        result: Machine-readable result.
        shown: Tables and lines for the terminal.
        notes: Further remarks for the reader.
        failed: Whether the experiment found an error.
    """

    result: dict[str, Any]
    shown: Sequence[Any] = ()
    notes: Sequence[str] = ()
    failed: bool = False


def flat(title: str, result: dict[str, Any], failed: bool = False) -> Outcome:
    """An outcome that is a flat result."""
    return Outcome(result, [flat_table(title, result)], failed=failed)
