"""A list of pages to read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from csd_spec.arrays import I64, U32


@dataclass(frozen=True)
class PagePlan:
    """Distinct flash pages behind a selection, how many bytes of it lie in each, and how many bytes of each have to
    cross the channel: the codewords that hold them. Pages come stream by stream."""

    ppns: U32  # (P,)
    useful: I64  # (P,)
    nbytes: I64  # (P,)
    ends: I64  # (N,): pages up to the last of each stream
    stored: bool = True  # False: their content is not in this array, they only take time

    @cached_property
    def useful_bytes(self) -> int:
        """Of all pages."""
        return int(self.useful.sum())

    @cached_property
    def fetched_bytes(self) -> int:
        """Of all pages."""
        return int(self.nbytes.sum())

    @classmethod
    def all_of(cls, ppns: U32, page_bytes: int) -> PagePlan:
        """Everything in these pages."""
        nbytes = np.full(ppns.size, page_bytes)
        return cls(ppns, nbytes, nbytes, np.array([ppns.size]))

    def only(self, wanted: NDArray[np.bool_]) -> PagePlan:
        """The pages (P,) that are wanted."""
        if wanted.all():
            return self
        ends = np.concatenate([[0], np.cumsum(wanted)])[self.ends]
        return PagePlan(self.ppns[wanted], self.useful[wanted], self.nbytes[wanted], ends, self.stored)

    def part(self, first: int, last: int) -> PagePlan:
        """The pages of streams from `first` to before `last`."""
        ends = self.ends[first:last]
        begin = int(self.ends[first - 1]) if first else 0
        mine = slice(begin, int(ends[-1]) if ends.size else begin)
        return PagePlan(self.ppns[mine], self.useful[mine], self.nbytes[mine], ends - begin, self.stored)
