"""A list of pages to read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from csd_spec.arrays import I64, U32


@dataclass(frozen=True)
class PagePlan:
    """Distinct flash pages to read, stream by stream."""

    ppns: U32  # (P,)
    useful: I64  # (P,) bytes of the selection in each page
    nbytes: I64  # (P,) bytes that cross the channel: the codewords that contain them
    ends: I64  # (N,) number of pages up to and including each stream
    stored: bool = True  # False: only the read time counts; the content is not in this array

    @cached_property
    def useful_bytes(self) -> int:
        """Useful bytes of all pages."""
        return int(self.useful.sum())

    @cached_property
    def fetched_bytes(self) -> int:
        """Bytes of all pages that cross the channel."""
        return int(self.nbytes.sum())

    @classmethod
    def all_of(cls, ppns: U32, page_bytes: int) -> PagePlan:
        """Plan that reads whole pages."""
        nbytes = np.full(ppns.size, page_bytes)
        return cls(ppns, nbytes, nbytes, np.array([ppns.size]))

    def only(self, wanted: NDArray[np.bool_]) -> PagePlan:
        """Return the plan restricted to the pages with wanted (P,) true."""
        if wanted.all():
            return self
        ends = np.concatenate([[0], np.cumsum(wanted)])[self.ends]
        return PagePlan(self.ppns[wanted], self.useful[wanted], self.nbytes[wanted], ends, self.stored)

    def part(self, first: int, last: int) -> PagePlan:
        """Return the plan of the streams `first` to `last` (exclusive)."""
        ends = self.ends[first:last]
        begin = int(self.ends[first - 1]) if first else 0
        pages = slice(begin, int(ends[-1]) if ends.size else begin)
        return PagePlan(self.ppns[pages], self.useful[pages], self.nbytes[pages], ends - begin, self.stored)
