"""What is so on this machine, and what makes it so where it is not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Missing:
    """found: what is there instead. fix: the command or the step that helps."""

    found: str
    fix: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that must be so."""

    what: str
    ok: bool
    found: str
    fix: str = ""
