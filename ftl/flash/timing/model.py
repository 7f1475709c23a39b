"""Interface of flash timing models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from csd_spec import Geometry, NandTiming
from csd_spec.arrays import I64, U32


class FlashOperation(NamedTuple):
    """A page read, a page program or a block erase in simulated time.

    Attributes:
        kind: `read`, `program` or `erase`.
        ppn: Physical page number; of an erase the block's first.
        nbytes: Bytes over the channel.
        begin_ns, end_ns: From when its lane is free for it until its last byte has arrived, or its lane is free again.
    """

    kind: str
    ppn: int
    nbytes: int
    begin_ns: int
    end_ns: int


Listener = Callable[[str, U32, int], None]  # "read" or "program", pages, start_ns
Reading = tuple[int, int, int, bool, int, int, I64, I64, I64]  # arguments of `calendar.occupy` after `start`


class FlashTiming(ABC):
    """Computes when flash operations end, in integer nanoseconds of simulated time.

    Attributes:
        grain_ns: Durations do not change if all start times are shifted by a multiple of this.
        page_bytes: Bytes of a page; 0 if the model does not use it.
        programmed_ns: End of the last program or erase.
        listener: Called for every read and program.
        tracer: Called for every page read, page program and block erase, with its times.
    """

    grain_ns = 1
    page_bytes = 0
    programmed_ns = 0
    listener: Listener | None = None
    tracer: Callable[[FlashOperation], None] | None = None

    @property
    def reading(self) -> Reading | None:
        """State for direct calls of `calendar.occupy`; None if reads must go through `read_ends`."""
        return None

    def read(self, ppns: U32, nbytes: I64, start_ns: int) -> int:
        """Sense pages and transfer nbytes (N,) of each over its channel; returns the last end, ns."""
        if self.listener:
            self.listener("read", ppns, start_ns)
        if self.tracer:
            return self._traced("read", ppns, nbytes, start_ns)
        return self.read_ends(ppns, nbytes, start_ns)

    def program(self, ppns: U32, start_ns: int) -> int:
        """Load and program whole pages; returns the last end, ns."""
        if self.listener:
            self.listener("program", ppns, start_ns)
        if self.tracer:
            finish_ns = self._traced("program", ppns, np.full(ppns.size, self.page_bytes), start_ns)
        else:
            finish_ns = self.program_ends(ppns, start_ns)
        assert finish_ns >= start_ns, "the program ends before it starts"
        self.programmed_ns = max(self.programmed_ns, finish_ns)
        return finish_ns

    def _traced(self, kind: str, ppns: U32, nbytes: I64, start_ns: int) -> int:
        """Time page by page, in the same order and thus with the same ends."""
        assert self.tracer
        finish_ns = start_ns
        for at in range(ppns.size):
            page, its_bytes = ppns[at : at + 1], nbytes[at : at + 1]
            begin_ns = max(start_ns, self.free_ns(page))
            reads = kind == "read"
            end_ns = self.read_ends(page, its_bytes, start_ns) if reads else self.program_ends(page, start_ns)
            self.tracer(FlashOperation(kind, int(page[0]), int(its_bytes[0]), begin_ns, end_ns))
            finish_ns = max(finish_ns, end_ns)
        return finish_ns

    def free_ns(self, ppns: U32) -> int:
        """When all lanes of these pages are free, ns."""
        return self.idle_ns()

    @abstractmethod
    def read_ends(self, ppns: U32, nbytes: I64, start_ns: int) -> int:
        """Return the last end of a read, ns."""

    @abstractmethod
    def program_ends(self, ppns: U32, start_ns: int) -> int:
        """Return the last end of programs, ns."""

    @abstractmethod
    def erase(self, lane: int, start_ns: int) -> int:
        """Erase one block of a lane; returns the end, ns."""

    @abstractmethod
    def idle_ns(self) -> int:
        """When every lane is idle, ns."""


TimingModel = Callable[[Geometry, NandTiming], FlashTiming]
