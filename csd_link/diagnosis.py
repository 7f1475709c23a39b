"""Results of checks of this machine, with suggested fixes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MissingDependency:
    """A missing requirement.

    Attributes:
        found: State that was found.
        fix: Command or step that fixes it.
    """

    found: str
    fix: str


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of checking one requirement."""

    what: str
    ok: bool
    found: str
    fix: str = ""
