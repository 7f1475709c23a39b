"""What is found wrong with an array."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from csd_spec.arrays import U32


@dataclass(slots=True)
class Damage:
    """What reading an array has found wrong.

    corrected: how many pages, spare areas and blocks' entries had one wrong bit. pages: those that are not what their
    spare areas say. spares: pages with spare areas that say nothing any more; blocks: those with such entries. files:
    those that are missing or have another size.
    """

    corrected: int = 0
    pages: set[int] = field(default_factory=set)
    spares: set[int] = field(default_factory=set)
    files: list[str] = field(default_factory=list)
    blocks: set[int] = field(default_factory=set)

    def of(self, ppns: U32) -> NDArray[np.bool_]:
        """Which of these pages are known not to be what their spare areas say."""
        return np.isin(ppns, list(self.pages)) if self.pages else np.zeros(ppns.shape, np.bool_)
