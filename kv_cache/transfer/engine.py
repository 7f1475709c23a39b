"""What an iteration is made of, as values, and what carries it out."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kv_cache.block_table import BlockKey, CopyRange, Transfer
from kv_cache.hardware import Route, Tier


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that was done: copy, select, drop, attend, rewrite; and crop and free, between iterations.

    tier: the target of a copy, else where it was done. tiers: of attention, those of a row's blocks. after: which of
    the iteration's acts are copies that one waits for.
    """

    kind: str
    tier: str = ""
    block: BlockKey | None = None
    source: str = ""
    fifo: bool = False
    layer: int = 0
    rows: tuple[Hashable, ...] = ()
    method: str = ""
    tokens: int = 0
    tiers: tuple[str, ...] = ()
    after: tuple[int, ...] = ()
    read: float = 1.0


@dataclass(frozen=True, slots=True)
class IterationRecord:
    """An iteration as it was: new tokens and actions; without new tokens, the actions between two iterations."""

    new: Mapping[Hashable, int]
    row_bytes: Mapping[Hashable, int]
    acts: list[Action]


@dataclass(frozen=True, slots=True)
class AttendCall:
    """Attention of one layer: of which requests, where, and who must have ended before.

    tiers: of each row's blocks; new tokens are born at the last. waits: transfers that bring what is attended.
    until_free: transfers that still use the bytes where new tokens are born. read: the share of tokens whose time it
    takes.
    """

    layer: int
    rows: tuple[Hashable, ...]
    tiers: tuple[str, ...]
    method: str
    blocks: tuple[BlockKey, ...]
    waits: tuple[Transfer, ...]
    until_free: tuple[Transfer, ...] = ()
    read: float = 1.0


class TransferEngine(Protocol):
    """What carries an iteration out: in modelled time, or with bytes.

    selects: Whether it can bring some tokens of a block alone.
    """

    @property
    def selects(self) -> bool: ...

    def begin(self, copy_range: CopyRange, route: Route, fifo: bool, urgency: float) -> Transfer:
        """Start a copy beside everything else.

        fifo: it enters its first link when the copy before it on this route has left that.
        """
        ...

    def release(self, block: BlockKey, tier: str, after: tuple[Transfer, ...]) -> None:
        """A block has left a tier, which some may still be using."""
        ...

    def attend(self, attention: AttendCall) -> None:
        """Compute a layer and attend; returns when that has been done, or, in drives, has been asked for."""
        ...

    def wait(self, transfers: Iterable[Transfer]) -> None:
        """Let the model wait for copies."""
        ...

    def end(self) -> None:
        """The iteration is over when all that was asked for has been computed; copies may go on."""
        ...

    def set_tiers(self, tiers: Mapping[str, Tier]) -> None:
        """Limits of tiers have changed."""
        ...

    def queued_s(self, route: Route) -> float:
        """Time for what is under way on a route."""
        ...

    def transfer_s(self, route: Route, nbytes: int) -> float:
        """Time of a copy that has the route for itself."""
        ...

    def layer_s(self) -> float:
        """Time of a layer without waiting: a moving average."""
        ...

    def page_cache_hits(self, tier: str) -> tuple[int, int] | None:
        """Bytes of a tier's files that were read, and of these what the page cache had; None where nobody knows."""
        ...
