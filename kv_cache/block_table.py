"""Block table: KV blocks, their copies in tiers, and the rules that no policy can break.

It knows neither clocks nor bytes. A *transfer* is the executor's handle of a copy in flight.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kv_cache.hardware import Tier

K, V, WEIGHTS = "k", "v", "weights"


class PolicyError(ValueError):
    """A policy requested something that the block table forbids; the message has the reason."""


class Transfer(Protocol):
    """A copy in flight."""

    @property
    def done(self) -> bool:
        """Whether it has finished, on success or failure."""
        ...

    @property
    def failed(self) -> bool:
        """Whether it has failed or is going to fail."""
        ...

    @property
    def began_ns(self) -> float:
        """Start time, ns: when the transfers that it waits for had finished."""
        ...

    @property
    def ended_ns(self) -> float:
        """End time, ns."""
        ...


@dataclass(frozen=True, slots=True)
class BlockKey:
    """Key of a block: K or V of a range of tokens in one layer of a request, or the weights of a layer.

    Attributes:
        request: A sequence, a batch that is kept together, or a shared prefix.
        layer: Layer index.
        part: `k`, `v`, `kv` (both) or `weights`.
        index: Block index in the layer, from 0.
    """

    request: Hashable
    layer: int
    part: str = K
    index: int = 0

    def __str__(self) -> str:
        more = f", block {self.index}" if self.index else ""
        return f"{self.part} of request {self.request}, layer {self.layer}{more}"


DropCallback = Callable[[BlockKey, str, tuple[Transfer, ...]], None]


@dataclass(slots=True)
class BlockCopy:
    """Copy of a block in a tier: its first `tokens` tokens; the last ones may still be in flight."""

    tokens: int
    arriving: list[Transfer] = field(default_factory=list)
    readers: list[Transfer] = field(default_factory=list)


@dataclass(slots=True)
class Block:
    """State of a block: bytes per token, number of tokens, copies by tier."""

    row_bytes: int
    tokens: int = 0
    copies: dict[str, BlockCopy] = field(default_factory=dict)
    attended: int = 0
    used: int = 0  # last iteration that attended it


@dataclass(slots=True)
class Selection:
    """Some tokens of a block, in a tier until the next attention to the block."""

    tier: str
    nbytes: int
    transfer: Transfer | None = None


@dataclass(frozen=True, slots=True)
class CopyRange:
    """Transfer of tokens [first, first + tokens) of a block between tiers, to start after the transfers in `after`.

    Attributes:
        after: Transfers to wait for: those in `needs`, and those that use the space until they finish.
        needs: Transfers that carry the same bytes; if one fails, this transfer fails.
    """

    block: BlockKey
    source: str
    target: str
    first: int
    tokens: int
    row_bytes: int
    after: tuple[Transfer, ...]
    needs: tuple[Transfer, ...]


class BlockTable:
    """Blocks and their copies.

    Rules: no tier exceeds its limit. A writer waits for the transfers that still use its space. A block does not move
    during its attention. The last complete copy is never dropped.
    """

    def __init__(self, tiers: Mapping[str, Tier], on_drop: DropCallback | None = None) -> None:
        """Create an empty table.

        Args:
            tiers: Tiers by name.
            on_drop: Called with a dropped copy (block, tier) and the transfers that still use it.
        """
        self.tiers, self._on_drop = tiers, on_drop
        self.entries: dict[BlockKey, Block] = {}
        self.selected: dict[BlockKey, Selection] = {}
        self.used: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._leaving: dict[str, deque[tuple[int, tuple[Transfer, ...]]]] = {name: deque() for name in tiers}

    def __getitem__(self, block: BlockKey) -> Block:
        try:
            return self.entries[block]
        except KeyError:
            raise PolicyError(f"{block}: there is no such block") from None

    def free_bytes(self, tier: str) -> float:
        """Free bytes of a tier. Space whose transfers have not finished counts as free."""
        limit = self._tier(tier).limit_bytes
        return float("inf") if limit is None else limit - self.used[tier]

    def tiers_of(self, block: BlockKey) -> tuple[str, ...]:
        """Tiers with a complete copy, including tokens in flight."""
        entry = self[block]
        return tuple(name for name, copy in entry.copies.items() if copy.tokens == entry.tokens)

    def add(self, block: BlockKey, row_bytes: int, tier: str, tokens: int = 0) -> list[Transfer]:
        """Add a block.

        Returns:
            Transfers that its writer has to wait for.
        """
        if block in self.entries:
            raise PolicyError(f"{block}: the block exists already")
        waits = self._take(tier, tokens * row_bytes)
        self.entries[block] = Block(row_bytes, tokens, {tier: BlockCopy(tokens)})
        return waits

    def grow(self, block: BlockKey, tier: str, tokens: int) -> list[Transfer]:
        """Append tokens in a tier that has a complete copy; other copies become partial.

        Returns:
            Transfers that the writer has to wait for.
        """
        entry = self[block]
        copy = self._whole(block, tier)
        waits = self._take(tier, tokens * entry.row_bytes)
        assert tokens >= 0 and copy.tokens == entry.tokens, f"{block}: {copy.tokens} tokens in {tier}"
        copy.tokens += tokens
        entry.tokens += tokens
        return waits

    def grow_in_place(self, blocks: Mapping[BlockKey, tuple[int, int]], tier: str, iteration: int) -> bool:
        """Append tokens to blocks, which may be new, and attend to them, in the tier of all blocks.

        Args:
            blocks: Number of new tokens and bytes per token of each block.
            tier: The tier.
            iteration: Number of the iteration.

        Returns:
            Whether this was possible without any transfer; if not, nothing has changed.
        """
        leaving = [transfer for _, transfers in self._leaving[tier] for transfer in transfers]
        if _pending(leaving) or any(nbytes for name, nbytes in self.used.items() if name != tier):
            return False
        for block in blocks:
            if (entry := self.entries.get(block)) is None:
                continue
            copy = entry.copies.get(tier)
            if entry.attended or copy is None or copy.tokens != entry.tokens or _missing(copy.arriving):
                return False
        nbytes = sum(tokens * row_bytes for tokens, row_bytes in blocks.values())
        if nbytes > self.free_bytes(tier):
            return False
        for block, (tokens, row_bytes) in blocks.items():
            if block not in self.entries:
                self.add(block, row_bytes, tier)
            entry = self.entries[block]
            copy = entry.copies[tier]
            copy.arriving.clear()
            copy.tokens += tokens
            entry.tokens += tokens
            entry.used = iteration
        self.used[tier] += nbytes
        self.peak[tier] = max(self.peak[tier], self.used[tier])
        return True

    def copy(self, block: BlockKey, source: str, target: str) -> CopyRange:
        """Copy a block to a tier; tokens that the tier has already are not moved again."""
        self._tier(target)
        entry, there = self[block], self._whole(block, source)
        self._check_attended(block, entry)
        here = entry.copies.get(target)
        first = here.tokens if here else 0
        waits = self._take(target, (entry.tokens - first) * entry.row_bytes)
        here = entry.copies.setdefault(target, BlockCopy(0))
        here.tokens = entry.tokens
        needs = tuple(_missing([*there.arriving, *here.arriving]))
        after = (*waits, *needs, *_pending(here.readers))
        return CopyRange(block, source, target, first, entry.tokens - first, entry.row_bytes, after, needs)

    def select(self, block: BlockKey, source: str, target: str, tokens: int) -> CopyRange:
        """Reserve space for some tokens of a block until its next attention; they are not a copy of it."""
        entry, there = self[block], self._whole(block, source)
        if block in self.selected or not 0 < tokens <= entry.tokens:
            raise PolicyError(f"{block}: {tokens} of its {entry.tokens} tokens: select 1 to all of them, once")
        self._check_attended(block, entry)
        nbytes = tokens * entry.row_bytes
        waits, needs = self._take(target, nbytes), tuple(_missing(there.arriving))
        self.selected[block] = Selection(target, nbytes)
        return CopyRange(block, source, target, 0, tokens, entry.row_bytes, (*waits, *needs), needs)

    def start_select(self, copy_range: CopyRange, transfer: Transfer) -> None:
        """Record the transfer of selected tokens."""
        self.selected[copy_range.block].transfer = transfer
        source = self[copy_range.block].copies[copy_range.source]
        source.readers = [*_pending(source.readers), transfer]

    def start_write(self, block: BlockKey, tier: str, transfer: Transfer) -> None:
        """Record the transfer of new tokens to a block that is attended by selection."""
        copy = self[block].copies[tier]
        copy.arriving = [*_missing(copy.arriving), transfer]

    def cancel_copy(self, copy_range: CopyRange) -> None:
        """Undo `copy` for a transfer that cannot start: the target keeps its earlier tokens."""
        block, target = copy_range.block, copy_range.target
        assert self[block].copies[target].tokens == copy_range.first + copy_range.tokens, f"{block}: changed since"
        self.used[target] -= copy_range.tokens * copy_range.row_bytes
        self[block].copies[target].tokens = copy_range.first
        if not copy_range.first:
            self._release_copy(block, target)

    def start_copy(self, copy_range: CopyRange, transfer: Transfer) -> None:
        """Record a started transfer."""
        copies = self[copy_range.block].copies
        target, source = copies[copy_range.target], copies[copy_range.source]
        assert transfer not in target.arriving and target.tokens >= copy_range.first + copy_range.tokens
        target.arriving = [*_missing(target.arriving), transfer]
        source.readers = [*_pending(source.readers), transfer]

    def drop(self, block: BlockKey, tier: str) -> None:
        """Drop a copy; later writers to its space wait for the transfers that still use it."""
        entry = self[block]
        self._check_attended(block, entry)
        copy = entry.copies.get(tier)
        if copy is None:
            raise PolicyError(f"{block}: {tier} has no copy of it to drop")
        if copy.tokens == entry.tokens and self.tiers_of(block) == (tier,):
            raise PolicyError(f"{block}: {tier} has the last whole copy of it, which cannot be dropped")
        self._release_copy(block, tier)

    def attend(self, blocks: Iterable[BlockKey], tier: str, iteration: int) -> list[Transfer]:
        """Start attention to blocks in a tier, or to their selected tokens if the tier cannot attend.

        Returns:
            Transfers that the attention has to wait for.
        """
        waits: list[Transfer] = []
        wanted = list(blocks)
        if not self._tier(tier).attends and not all(block in self.selected for block in wanted):
            raise PolicyError(f"{tier} does not attend: copy the blocks to a tier that does, or select tokens of them")
        for block in wanted:
            selection = self.selected.get(block)
            came = [selection.transfer] if selection and selection.transfer else []
            waits += _missing(came or self._whole(block, tier).arriving)
        for block in wanted:
            self.entries[block].attended += 1
            self.entries[block].used = iteration
        return waits

    def end_attention(self, blocks: Iterable[BlockKey]) -> None:
        """End the attention to blocks."""
        for block in blocks:
            self.entries[block].attended -= 1
            assert self.entries[block].attended >= 0, f"{block}: its attention ends twice"
            self._forget_selection(block)

    def crop(self, block: BlockKey, tokens: int) -> None:
        """Keep only the first `tokens` tokens of a block without transfers in flight."""
        entry = self[block]
        for tier, copy in entry.copies.items():
            assert not _pending([*copy.arriving, *copy.readers]), f"{block}: cropped while it moves"
            keep = min(copy.tokens, tokens)
            self.used[tier] -= (copy.tokens - keep) * entry.row_bytes
            assert self.used[tier] >= 0, tier
            copy.tokens = keep
        entry.tokens = min(entry.tokens, tokens)

    def drop_stale_copies(self, block: BlockKey, tier: str) -> None:
        """Drop all other copies of a block that was rewritten in a tier."""
        self._whole(block, tier)
        for other in set(self[block].copies) - {tier}:
            self._release_copy(block, other)

    def free(self, request: Hashable) -> None:
        """Remove all blocks of a request."""
        for block in [block for block in self.entries if block.request == request]:
            for tier in list(self.entries[block].copies):
                self._release_copy(block, tier)
            self._forget_selection(block)
            del self.entries[block]

    def check(self) -> None:
        """Raise AssertionError if the accounting is inconsistent."""
        held: Counter[str] = Counter()
        for block, entry in self.entries.items():
            assert self.tiers_of(block), f"{block}: no tier has a whole copy"
            for tier, copy in entry.copies.items():
                held[tier] += copy.tokens * entry.row_bytes
        for selection in self.selected.values():
            held[selection.tier] += selection.nbytes
        assert all(held[tier] == self.used[tier] for tier in self.tiers), (held, self.used)
        for name, spec in self.tiers.items():
            assert spec.limit_bytes is None or self.used[name] <= spec.limit_bytes, name

    def _forget_selection(self, block: BlockKey) -> None:
        if selection := self.selected.pop(block, None):
            self.used[selection.tier] -= selection.nbytes
            assert self.used[selection.tier] >= 0, selection.tier

    def _release_copy(self, block: BlockKey, tier: str) -> None:
        entry = self.entries[block]
        copy = entry.copies.pop(tier)
        nbytes = copy.tokens * entry.row_bytes
        self.used[tier] -= nbytes
        assert copy.tokens <= entry.tokens and self.used[tier] >= 0, f"{block}: {self.used[tier]} bytes used in {tier}"
        still = tuple(_pending([*copy.readers, *copy.arriving]))
        if still:
            self._leaving[tier].append((nbytes, still))
        if self._on_drop:
            self._on_drop(block, tier, still)

    def _take(self, tier: str, nbytes: int) -> list[Transfer]:
        """Allocate bytes of a tier.

        Returns:
            Transfers that still use this space.
        """
        assert nbytes >= 0, f"{nbytes} bytes of {tier}: copies have more tokens than their block"
        limit = self._tier(tier).limit_bytes
        if nbytes > self.free_bytes(tier):
            free = self.free_bytes(tier)
            raise PolicyError(f"{tier} is full: {nbytes:,} bytes are wanted, {free:,.0f} of {limit:,} are free")
        self.used[tier] += nbytes
        self.peak[tier] = max(self.peak[tier], self.used[tier])
        leaving = self._leaving[tier]
        remaining = deque(entry for entry in leaving if not all(transfer.done for transfer in entry[1]))
        self._leaving[tier] = remaining
        if limit is None:
            return []
        waits: list[Transfer] = []
        over = self.used[tier] + sum(size for size, _ in remaining) - limit
        for size, transfers in remaining:
            if over <= 0:
                break
            waits += transfers
            over -= size
        return waits

    def _whole(self, block: BlockKey, tier: str) -> BlockCopy:
        entry = self[block]
        copy = entry.copies.get(tier)
        if copy is None or copy.tokens < entry.tokens:
            has = f"{copy.tokens} of its {entry.tokens} tokens" if copy else "no copy of it"
            raise PolicyError(f"{block}: {self._tier(tier).name} has {has}")
        return copy

    def _tier(self, name: str) -> Tier:
        try:
            return self.tiers[name]
        except KeyError:
            raise PolicyError(f"there is no tier {name!r}: there are {', '.join(self.tiers)}") from None

    @staticmethod
    def _check_attended(block: BlockKey, entry: Block) -> None:
        if entry.attended:
            raise PolicyError(f"{block} is attended: it cannot move now")


def _pending(transfers: Iterable[Transfer]) -> list[Transfer]:
    """Transfers that have not finished."""
    return [transfer for transfer in transfers if not transfer.done]


def _missing(transfers: Iterable[Transfer]) -> list[Transfer]:
    """Transfers whose bytes have not arrived: in flight or failed."""
    return [transfer for transfer in transfers if transfer.failed or not transfer.done]
