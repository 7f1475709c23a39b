"""Range checks shared by the values of this package."""

from __future__ import annotations

from numbers import Real


def at_least(low: float, **fields: float) -> None:
    """Raise ValueError for the first field that is not a number, or is below `low`."""
    for name, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not value >= low:
            raise ValueError(f"{name} = {value!r}: must be a number of at least {low}")
