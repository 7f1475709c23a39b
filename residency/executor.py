"""What a turn is made of, as values, and what carries it out."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from residency.machine import Path
from residency.table import Extent, Ticket, Transfer


@dataclass(frozen=True, slots=True)
class Act:
    """One thing that was done: copy, drop, attend, rewrite; and crop and free, between turns.

    place: the target of a copy, else where it was done. places: of attention, those of a row's blocks. after: which of
    the turn's acts are copies that one waits for.
    """

    kind: str
    place: str = ""
    extent: Extent | None = None
    source: str = ""
    in_turn: bool = False
    layer: int = 0
    rows: tuple[Hashable, ...] = ()
    method: str = ""
    tokens: int = 0
    places: tuple[str, ...] = ()
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Recorded:
    """A turn as it was: what was new, and what was done; or, without anything new, what was done between turns."""

    new: Mapping[Hashable, int]
    row_bytes: Mapping[Hashable, int]
    acts: list[Act]


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of one layer: of which requests, where, and who must have ended before.

    places: of each row's blocks; new tokens are born at the last. waits: who brings what is attended. room: who still
    uses the bytes where new tokens are born.
    """

    layer: int
    rows: tuple[Hashable, ...]
    places: tuple[str, ...]
    method: str
    extents: tuple[Extent, ...]
    waits: tuple[Ticket, ...]
    room: tuple[Ticket, ...] = ()


class Executor(Protocol):
    """What carries a turn out: in modelled time, or with bytes."""

    def begin(self, transfer: Transfer, path: Path, in_turn: bool, urgency: float) -> Ticket:
        """Start a copy beside everything else.

        in_turn: it enters its first link when the copy before it on this path has left that.
        """
        ...

    def release(self, extent: Extent, place: str, after: tuple[Ticket, ...]) -> None:
        """An extent has left a place, which some may still be using."""
        ...

    def attend(self, attention: Attention) -> None:
        """Compute a layer and attend; returns when that has been done, or, in drives, has been asked for."""
        ...

    def wait(self, tickets: Iterable[Ticket]) -> None:
        """Let the model wait for copies."""
        ...

    def end(self) -> None:
        """The turn is over when all that was asked for has been computed; copies may go on."""
        ...

    def queued_s(self, path: Path) -> float:
        """Time for what is under way on a path."""
        ...

    def transfer_s(self, path: Path, nbytes: int) -> float:
        """Time of a copy that has the path for itself."""
        ...

    def layer_s(self) -> float:
        """Time of a layer without waiting: a moving average."""
        ...

    def found(self, place: str) -> tuple[int, int] | None:
        """Bytes of a place's files that were read, and of these what the page cache had; None where nobody knows."""
        ...
