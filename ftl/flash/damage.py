"""Damage found in a NAND array."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from csd_spec.arrays import U32


@dataclass(slots=True)
class ArrayDamage:
    """Damage found while reading an array.

    Attributes:
        corrected: Number of pages, spare areas and block entries with one corrected bit.
        pages: Pages whose content does not match their spare area.
        spares: Pages whose spare area is unreadable.
        files: Files that are missing or have a wrong size.
        blocks: Blocks whose entry is unreadable.
    """

    corrected: int = 0
    pages: set[int] = field(default_factory=set)
    spares: set[int] = field(default_factory=set)
    files: list[str] = field(default_factory=list)
    blocks: set[int] = field(default_factory=set)

    def contains(self, ppns: U32) -> NDArray[np.bool_]:
        """Return which of the pages are known to be damaged."""
        return np.isin(ppns, list(self.pages)) if self.pages else np.zeros(ppns.shape, np.bool_)
