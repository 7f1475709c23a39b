"""What a model of flash time is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from csd_spec import Geometry, NandTiming
from csd_spec.arrays import I64, U32

Listener = Callable[[str, U32, int], None]  # "read" or "program", pages, when they were asked for
Reading = tuple[int, int, int, bool, int, int, I64, I64, I64]  # what `calendar.occupy` takes behind start


class FlashTiming(ABC):
    """When flash operations end. Time in, time out, in integer nanoseconds of modelled time.

    grain_ns: durations are the same for all start times that differ by multiples of it. listener: told of every read
    and program. programmed_ns: when the last program, or erase, ends.
    """

    grain_ns = 1
    programmed_ns = 0
    listener: Listener | None = None

    @property
    def reading(self) -> Reading | None:
        """For who calls `calendar.occupy` in place of `read_ends`; None: this model has to be asked."""
        return None

    def read(self, ppns: U32, nbytes: I64, start_ns: int) -> int:
        """Sense pages and bring nbytes (N,) of each over its channel; returns the last end."""
        if self.listener:
            self.listener("read", ppns, start_ns)
        return self.read_ends(ppns, nbytes, start_ns)

    def program(self, ppns: U32, start_ns: int) -> int:
        """Load and program whole pages; returns the last end."""
        if self.listener:
            self.listener("program", ppns, start_ns)
        finish_ns = self.program_ends(ppns, start_ns)
        self.programmed_ns = max(self.programmed_ns, finish_ns)
        return finish_ns

    def free_ns(self, ppns: U32) -> int:
        """When the last lane that pages lie on is free."""
        return self.idle_ns()

    @abstractmethod
    def read_ends(self, ppns: U32, nbytes: I64, start_ns: int) -> int:
        """The last end of a read."""

    @abstractmethod
    def program_ends(self, ppns: U32, start_ns: int) -> int:
        """The last end of programs."""

    @abstractmethod
    def erase(self, lane: int, start_ns: int) -> int:
        """Erase one block of a lane; returns the end."""

    @abstractmethod
    def idle_ns(self) -> int:
        """When every lane is idle."""


TimingModel = Callable[[Geometry, NandTiming], FlashTiming]
