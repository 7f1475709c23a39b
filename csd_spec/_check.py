"""Checks shared by the values of this package."""

from __future__ import annotations


def at_least(low: float, **fields: float) -> None:
    """Raise ValueError naming the first field below `low`."""
    for name, value in fields.items():
        if not value >= low:
            raise ValueError(f"{name} = {value}: must be at least {low}")
