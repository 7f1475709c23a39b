"""What an experiment is: a module with a function `experiment`, whose arguments are its options and whose value is an
`Outcome`.

The arguments carry `typer.Option` in their annotations; one that is a frozen dataclass stands for an option for each of
its fields, so that experiments can share a list of options. `vcsd_cli.experiments` has a line for each experiment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vcsd.tables import flat_table


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


def flat(title: str, result: dict[str, Any], failed: bool = False) -> Outcome:
    """An outcome that is a flat result."""
    return Outcome(result, [flat_table(title, result)], failed=failed)
