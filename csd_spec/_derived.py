"""Fields of a frozen dataclass that follow from its others: computed when it is made, and not compared or shown."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def derived() -> Any:
    """Declare such a field; `__post_init__` sets it by `derive`."""
    return field(init=False, repr=False, compare=False)


def derive(value: object, **fields: Any) -> None:
    """Set fields of a frozen value that is being made."""
    for name, content in fields.items():
        object.__setattr__(value, name, content)
