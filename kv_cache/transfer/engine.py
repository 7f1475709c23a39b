"""Actions of an iteration as values, and the interface of their executors."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kv_cache.block_table import BlockKey, CopyRange, Transfer
from kv_cache.hardware import Route, Tier


@dataclass(frozen=True, slots=True)
class Action:
    """One action: copy, select, drop, attend or rewrite; crop or free between iterations.

    Attributes:
        kind: Name of the action.
        tier: Target of a copy, otherwise the tier of the action.
        block: Block, if the action has one.
        source: Source tier of a copy.
        fifo: Whether the copy queues on its first link.
        layer, rows, method: Layer, requests and method of attention.
        tokens: Tokens of a selection or crop.
        tiers: Tier of each block of a row, for attention.
        after: Indices of earlier copies in this iteration that the copy waits for.
        read: Fraction of the tokens that attention takes the time of.
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
    """Recorded iteration: new tokens and actions; without new tokens, actions between two iterations."""

    new: Mapping[Hashable, int]
    row_bytes: Mapping[Hashable, int]
    acts: list[Action]


@dataclass(frozen=True, slots=True)
class AttendCall:
    """Attention of one layer.

    Attributes:
        layer: Layer index.
        rows: Requests.
        tiers: Tier of each block of a row; new tokens are created in the last.
        method: Attention method.
        blocks: Blocks to attend.
        waits: Transfers that carry these blocks.
        until_free: Transfers that still use the space of the new tokens.
        read: Fraction of the tokens that attention takes the time of.
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
    """Executor of an iteration, in simulated time or with real bytes.

    Attributes:
        selects: Whether it can copy single tokens of a block.
    """

    @property
    def selects(self) -> bool: ...

    def begin(self, copy_range: CopyRange, route: Route, fifo: bool, urgency: float) -> Transfer:
        """Start a copy.

        Args:
            copy_range: Block, tokens and tiers.
            route: Route between the tiers.
            fifo: Enter the first link when the previous copy on this route has left it.
            urgency: Priority; larger is first.
        """
        ...

    def release(self, block: BlockKey, tier: str, after: tuple[Transfer, ...]) -> None:
        """Called when a copy was dropped; the transfers in `after` may still use it."""
        ...

    def attend(self, attention: AttendCall) -> None:
        """Compute a layer; returns when it is complete or, for drives, submitted."""
        ...

    def wait(self, transfers: Iterable[Transfer]) -> None:
        """Make the model wait for copies."""
        ...

    def end(self) -> None:
        """End the iteration when all its layers are complete; copies may continue."""
        ...

    def set_tiers(self, tiers: Mapping[str, Tier]) -> None:
        """Apply new limits of tiers."""
        ...

    def queued_s(self, route: Route) -> float:
        """Time of the transfers in flight on a route, seconds."""
        ...

    def transfer_s(self, route: Route, nbytes: int) -> float:
        """Time of a copy that has the route to itself, seconds."""
        ...

    def layer_s(self) -> float:
        """Moving average of the time of a layer without waiting, seconds."""
        ...

    def page_cache_hits(self, tier: str) -> tuple[int, int] | None:
        """Bytes read from a tier's files, and bytes of these found in the page cache; None if unknown."""
        ...
