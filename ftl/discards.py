"""Ranges of discarded logical pages; they keep old content from coming back after a power cycle."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np

from csd_spec.arrays import I64, U64

Range = tuple[int, int, int]  # first page, end (exclusive), number of the last write that the discard undoes


class Discards:
    """Disjoint ranges in ascending order; the list is replaced, never changed in place.

    Later writes to a page have higher write numbers, so a range stays valid when its pages are written again. It is
    replaced when the pages are discarded again.
    """

    def __init__(self, ranges: Iterable[Iterable[int]] = ()) -> None:
        self.ranges: list[Range] = [(first, end, number) for first, end, number in ranges]

    def add(self, first: int, end: int, number: int, empty: Callable[[int, int], bool]) -> None:
        """Record that pages `first` to `end` (exclusive) no longer hold data of writes up to `number`.

        Args:
            empty: Returns whether a range of pages is unmapped; adjacent ranges that are unmapped are merged.
        """
        ranges = list[Range]()
        for a, b, old in self.ranges:
            if b < first or end < a:
                ranges.append((a, b, old))
            elif empty(a, min(b, first)) and empty(max(a, end), b):
                first, end = min(first, a), max(end, b)
            else:
                ranges += [(a, min(b, first), old)] * (a < first) + [(max(a, end), b, old)] * (end < b)
        self.ranges = sorted([*ranges, (first, end, number)])
        assert all(a[0] < a[1] <= b[0] for a, b in pairwise(self.ranges)), "ranges overlap"

    def undone(self, lpns: I64) -> U64:
        """Number of the last undone write of each logical page, (N,) uint64; 0 if there was no discard."""
        table: I64 = np.array([(0, 0, 0), *self.ranges], np.int64)
        at = np.searchsorted(table[:, 0], lpns, "right") - 1
        undone: U64 = np.where(lpns < table[at, 1], table[at, 2], 0).astype(np.uint64)
        return undone
