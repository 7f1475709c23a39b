"""Pages that several sequences have: one that is forked shares what it begins with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from csd_spec.arrays import U8, U32
from ftl.flash.memory import lazy_zeros


class SharedPages:
    """How many sequences have a page beside one, (pages,): so that giving pages up costs what they are, not how many
    relatives a sequence has."""

    def __init__(self, pages: int) -> None:
        self.others = lazy_zeros((pages,), np.uint16)

    def share(self, ppns: U32) -> None:
        """One more sequence has these pages."""
        self.others[ppns] += 1

    def leave(self, ppns: U32) -> NDArray[np.bool_]:
        """One sequence less has these pages; which of them nobody has any more."""
        last: NDArray[np.bool_] = self.others[ppns] == 0
        self.others[ppns[~last]] -= 1
        return last

    def found(self, ppns: U32, seen: U8) -> None:
        """Power-on has found a sequence with these pages. seen: those of the sequences before it, (pages,)."""
        self.share(ppns[seen[ppns] > 0])

    def moved(self, old: U32, new: U32) -> None:
        """Pages have another place."""
        self.others[new] = self.others[old]
        self.others[old] = 0
