"""Reference counts of pages that forks share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from csd_spec.arrays import U8, U32
from ftl.flash.memory import reserve_zeros


class SharedPages:
    """Number of additional sequences that hold each page, (pages,).

    With counts, the cost of releasing pages depends on their number, not on the number of forks.
    """

    def __init__(self, pages: int) -> None:
        self.others = reserve_zeros((pages,), np.uint16)

    def share(self, ppns: U32) -> None:
        """Add one reference to these pages."""
        assert self.others[ppns].max(initial=0) < np.iinfo(self.others.dtype).max, "a page has too many holders"
        self.others[ppns] += 1

    def release(self, ppns: U32) -> NDArray[np.bool_]:
        """Drop one reference to these pages; returns which of them are no longer referenced."""
        last: NDArray[np.bool_] = self.others[ppns] == 0
        self.others[ppns[~last]] -= 1
        return last

    def found(self, ppns: U32, seen: U8) -> None:
        """Add a reference at power-on to pages that an earlier sequence holds; `seen` (pages,) marks those."""
        self.share(ppns[seen[ppns] > 0])

    def moved(self, old: U32, new: U32) -> None:
        """Move the counts of pages."""
        assert not self.others[new].any(), "a page that was free has holders"
        self.others[new] = self.others[old]
        self.others[old] = 0
