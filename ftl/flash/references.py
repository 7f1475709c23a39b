"""Who refers to pages: the one thing that the flash store asks of the layers above."""

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
    """A table of page numbers, which of the tags asked for may stand in it, and where.

    place: an index of `table` for each of `which`; None is anywhere.
    """

    table: U32
    which: I64
    place: Any

    def holds(self, pages: U32) -> NDArray[np.bool_]:
        """For each of `which`, whether the table has its page of `pages`."""
        found: NDArray[np.bool_] = (
            np.isin(pages[self.which], self.table)
            if self.place is None
            else self.table[self.place] == pages[self.which]
        )
        return found

    def move(self, old: U32, new: U32) -> None:
        """Let the table have the new page wherever it has the old one."""
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
        """All tables have new pages in place of old ones."""

    def checkpoint_pages(self) -> int:
        """Pages that a journal checkpoint of its state may take at most; none where tags say everything."""
        return 0

    def overwrite_blocks(self) -> int:
        """Blocks that must stay free for what takes another page's place to be programmed before that one is erased."""
        return 0

    def lose(self, tags: U64, for_good: bool) -> list[int]:
        """Pages with these tags could not be read; returns the handles of sequences that lost data.

        for_good: their content is gone, and to be recorded as lost before they look whole again somewhere else.
        """
        return []


def valid(referrers: list[Referrer], pages: U32, tags: U64) -> NDArray[np.bool_]:
    """Which pages some table holds."""
    found = np.zeros(pages.size, bool)
    for referrer in referrers:
        for reference in referrer.references(tags):
            found[reference.which] |= reference.holds(pages)
    return found


def remap(referrers: list[Referrer], old: U32, new: U32, tags: U64) -> None:
    """Let every table that holds an old page hold its new place."""
    for referrer in referrers:
        for reference in referrer.references(tags):
            reference.move(old, new)
        referrer.moved(old, new)
