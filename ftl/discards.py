"""Which logical pages were discarded, so that what a page held before does not come back with a power-on."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from csd_spec.arrays import I64, U64

Range = tuple[int, int, int]  # first page, the one behind the last, and the last write that a discard has undone


class Discards:
    """Disjoint ranges, ascending, in a list that is never changed in place.

    What a page was given later has a higher number of write, so a range stays as it is when its pages are written
    again; it goes when they are discarded again.
    """

    def __init__(self, ranges: Iterable[Iterable[int]] = ()) -> None:
        self.ranges: list[Range] = [(first, end, number) for first, end, number in ranges]

    def add(self, first: int, end: int, number: int, empty: Callable[[int, int], bool]) -> None:
        """Note that pages first to end hold nothing of the writes up to `number`.

        empty: whether pages hold nothing; ranges beside this one that do become one with it.
        """
        kept = list[Range]()
        for a, b, old in self.ranges:
            if b < first or end < a:
                kept.append((a, b, old))
            elif empty(a, min(b, first)) and empty(max(a, end), b):
                first, end = min(first, a), max(end, b)
            else:
                kept += [(a, min(b, first), old)] * (a < first) + [(max(a, end), b, old)] * (end < b)
        self.ranges = sorted([*kept, (first, end, number)])

    def undone(self, lpns: I64) -> U64:
        """For each logical page the last write that was undone, or 0."""
        table: I64 = np.array([(0, 0, 0), *self.ranges], np.int64)
        at = np.searchsorted(table[:, 0], lpns, "right") - 1
        found: U64 = np.where(lpns < table[at, 1], table[at, 2], 0).astype(np.uint64)
        return found
