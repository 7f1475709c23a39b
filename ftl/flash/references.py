"""References to pages: the interface that the layers above implement for the flash store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csd_spec.arrays import I64, U32, U64


@dataclass(frozen=True, slots=True)
class Reference:
    """A table of page numbers, and the entries that may hold pages with the requested tags.

    Attributes:
        table: Page numbers.
        which: Indices of the requested tags that may be in the table.
        place: Index into `table` for each of `which`; None if the position is unknown.
    """

    table: U32
    which: I64
    place: Any

    def holds(self, pages: U32) -> NDArray[np.bool_]:
        """Whether the table holds pages[which], for each of `which`."""
        held: NDArray[np.bool_] = (
            np.isin(pages[self.which], self.table)
            if self.place is None
            else self.table[self.place] == pages[self.which]
        )
        return held

    def move(self, old: U32, new: U32) -> None:
        """Replace old pages with new ones in the table."""
        if self.place is None:
            for i in self.which:
                self.table[self.table == old[i]] = new[i]
        else:
            there = self.table[self.place]
            self.table[self.place] = np.where(there == old[self.which], new[self.which], there)


class Referrer(ABC):
    """A layer that keeps pages in use: the KV map, the block namespace, the journal."""

    @abstractmethod
    def references(self, tags: U64) -> Iterator[Reference]:
        """Tables that may hold pages with these tags."""

    def moved(self, old: U32, new: U32) -> None:  # noqa: B027 - most keep nothing by page
        """Called after pages were moved, once all tables are updated."""

    def checkpoint_pages(self) -> int:
        """Maximum pages that a journal checkpoint of this layer takes; 0 if tags hold all of its state."""
        return 0

    def overwrite_blocks(self) -> int:
        """Blocks that must stay free so that a page can be rewritten before its old copy is erased."""
        return 0

    def lose(self, tags: U64, for_good: bool) -> list[int]:
        """Handle pages with these tags that could not be read.

        Args:
            for_good: The content is lost permanently. Record this before the pages are moved: a copy looks intact.

        Returns:
            Handles of sequences that lost data.
        """
        return []


def valid(referrers: list[Referrer], pages: U32, tags: U64) -> NDArray[np.bool_]:
    """Return which pages are referenced by a table."""
    is_valid = np.zeros(pages.size, bool)
    for referrer in referrers:
        for reference in referrer.references(tags):
            is_valid[reference.which] |= reference.holds(pages)
    return is_valid


def remap(referrers: list[Referrer], old: U32, new: U32, tags: U64) -> None:
    """Replace old pages with new ones in every table."""
    for referrer in referrers:
        for reference in referrer.references(tags):
            reference.move(old, new)
        referrer.moved(old, new)
