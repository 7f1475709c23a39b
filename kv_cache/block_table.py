"""Who is where: the table of blocks and their copies, and the rules that no policy can break.

It knows neither clocks nor bytes. A *transfer* is whatever an executor gives for a copy under way.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kv_cache.hardware import Tier

K, V, WEIGHTS = "k", "v", "weights"


class PolicyError(ValueError):
    """A policy asked for what the table forbids, with the reason."""


class Transfer(Protocol):
    """A copy under way."""

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        ...

    @property
    def failed(self) -> bool:
        """Whether it has ended, or is going to, without what it was to bring."""
        ...

    @property
    def began_ns(self) -> float:
        """When it could begin: those that it waits for had ended."""
        ...

    @property
    def ended_ns(self) -> float:
        """When it had ended."""
        ...


@dataclass(frozen=True, slots=True)
class BlockKey:
    """K or V of a run of tokens of one layer of a request, or a layer's weights: what moves as one.

    request: a sequence, a batch that is kept together, or a shared prefix. index: which run of tokens, from 0.
    """

    request: Hashable
    layer: int
    part: str = K
    index: int = 0

    def __str__(self) -> str:
        more = f", block {self.index}" if self.index else ""
        return f"{self.part} of request {self.request}, layer {self.layer}{more}"


Left = Callable[[BlockKey, str, tuple[Transfer, ...]], None]


@dataclass(slots=True)
class Replica:
    """A block at a tier: its first `tokens`, of which the last may still arrive."""

    tokens: int
    arriving: list[Transfer] = field(default_factory=list)
    readers: list[Transfer] = field(default_factory=list)


@dataclass(slots=True)
class Block:
    """A block: how many tokens it has, each of so many bytes, and where."""

    row_bytes: int
    tokens: int = 0
    copies: dict[str, Replica] = field(default_factory=dict)
    attended: int = 0
    used: int = 0  # the iteration that attended it last


@dataclass(slots=True)
class Selection:
    """Some tokens of a block, at a tier until the block is attended next."""

    tier: str
    nbytes: int
    transfer: Transfer | None = None


@dataclass(frozen=True, slots=True)
class CopyRange:
    """Tokens [first, first + tokens) of a block, from one tier to another, when those in `after` have ended.

    needs: of those, whose bytes it is about; without them it is nothing. The others only use the room until they end.
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

    The rules: no tier holds more than its limit; who takes room that somebody still leaves waits for that to end;
    nothing moves while it is attended; the last whole copy is never dropped.
    """

    def __init__(self, tiers: Mapping[str, Tier], left: Left | None = None) -> None:
        """left: called for a copy that has been given up, with the transfers of those that still use it."""
        self.tiers, self._left = tiers, left
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
        """Bytes that may still be taken; those that somebody leaves count as free."""
        limit = self._tier(tier).limit_bytes
        return float("inf") if limit is None else limit - self.used[tier]

    def tiers_of(self, block: BlockKey) -> tuple[str, ...]:
        """Tiers that hold all of it, or are going to."""
        entry = self[block]
        return tuple(name for name, copy in entry.copies.items() if copy.tokens == entry.tokens)

    def add(self, block: BlockKey, row_bytes: int, tier: str, tokens: int = 0) -> list[Transfer]:
        """A new block; whoever writes there waits for the transfers returned."""
        if block in self.entries:
            raise PolicyError(f"{block} is there already")
        waits = self._take(tier, tokens * row_bytes)
        self.entries[block] = Block(row_bytes, tokens, {tier: Replica(tokens)})
        return waits

    def grow(self, block: BlockKey, tier: str, tokens: int) -> list[Transfer]:
        """Tokens were computed at a tier, which holds all of them up to there; the other copies are behind now."""
        entry = self[block]
        copy = self._whole(block, tier)
        waits = self._take(tier, tokens * entry.row_bytes)
        copy.tokens += tokens
        entry.tokens += tokens
        return waits

    def copy(self, block: BlockKey, source: str, target: str) -> CopyRange:
        """Let a tier have all of a block; what it has already is not moved again."""
        self._tier(target)
        entry, there = self[block], self._whole(block, source)
        self._check_attended(block, entry)
        here = entry.copies.get(target)
        first = here.tokens if here else 0
        waits = self._take(target, (entry.tokens - first) * entry.row_bytes)
        here = entry.copies.setdefault(target, Replica(0))
        here.tokens = entry.tokens
        needs = tuple(_missing([*there.arriving, *here.arriving]))
        after = (*waits, *needs, *_pending(here.readers))
        return CopyRange(block, source, target, first, entry.tokens - first, entry.row_bytes, after, needs)

    def select(self, block: BlockKey, source: str, target: str, tokens: int) -> CopyRange:
        """Take room for some tokens of a block until it is attended next; they are no copy of it."""
        entry, there = self[block], self._whole(block, source)
        if block in self.selected or not 0 < tokens <= entry.tokens:
            raise PolicyError(f"{block}: {tokens} of its {entry.tokens} tokens: select 1 to all of them, once")
        self._check_attended(block, entry)
        nbytes = tokens * entry.row_bytes
        waits, needs = self._take(target, nbytes), tuple(_missing(there.arriving))
        self.selected[block] = Selection(target, nbytes)
        return CopyRange(block, source, target, 0, tokens, entry.row_bytes, (*waits, *needs), needs)

    def selecting(self, copy_range: CopyRange, transfer: Transfer) -> None:
        """Selected tokens are under way."""
        self.selected[copy_range.block].transfer = transfer
        source = self[copy_range.block].copies[copy_range.source]
        source.readers = [*_pending(source.readers), transfer]

    def writing(self, block: BlockKey, tier: str, transfer: Transfer) -> None:
        """New tokens of a block that was attended by selection are under way to it."""
        copy = self[block].copies[tier]
        copy.arriving = [*_missing(copy.arriving), transfer]

    def not_begun(self, copy_range: CopyRange) -> None:
        """A transfer cannot begin: its target has what it had before."""
        block, target = copy_range.block, copy_range.target
        self.used[target] -= copy_range.tokens * copy_range.row_bytes
        self[block].copies[target].tokens = copy_range.first
        if not copy_range.first:
            self._leave(block, target)

    def begun(self, copy_range: CopyRange, transfer: Transfer) -> None:
        """A transfer is under way."""
        copies = self[copy_range.block].copies
        target, source = copies[copy_range.target], copies[copy_range.source]
        target.arriving = [*_missing(target.arriving), transfer]
        source.readers = [*_pending(source.readers), transfer]

    def drop(self, block: BlockKey, tier: str) -> None:
        """Give up a copy; its room is free for those who wait for whoever still reads it."""
        entry = self[block]
        self._check_attended(block, entry)
        copy = entry.copies.get(tier)
        if copy is None:
            raise PolicyError(f"{block}: nothing of it is at {tier}")
        if copy.tokens == entry.tokens and self.tiers_of(block) == (tier,):
            raise PolicyError(f"{block}: {tier} has the last whole copy of it, which cannot be dropped")
        self._leave(block, tier)

    def attend(self, blocks: Iterable[BlockKey], tier: str, iteration: int) -> list[Transfer]:
        """They are attended at a tier from now on; begins when the transfers have ended.

        Where the tier does not attend, to what was selected of them.
        """
        waits: list[Transfer] = []
        wanted = list(blocks)
        if not self._tier(tier).attends and not all(block in self.selected for block in wanted):
            raise PolicyError(f"{tier} does not attend")
        for block in wanted:
            selection = self.selected.get(block)
            came = [selection.transfer] if selection and selection.transfer else []
            waits += _missing(came or self._whole(block, tier).arriving)
        for block in wanted:
            self.entries[block].attended += 1
            self.entries[block].used = iteration
        return waits

    def attended(self, blocks: Iterable[BlockKey]) -> None:
        """They are attended no longer."""
        for block in blocks:
            self.entries[block].attended -= 1
            self._forget_selection(block)

    def crop(self, block: BlockKey, tokens: int) -> None:
        """Forget all but the first tokens; nothing of it may be under way."""
        entry = self[block]
        for tier, copy in entry.copies.items():
            keep = min(copy.tokens, tokens)
            self.used[tier] -= (copy.tokens - keep) * entry.row_bytes
            copy.tokens = keep
        entry.tokens = min(entry.tokens, tokens)

    def rewritten(self, block: BlockKey, tier: str) -> None:
        """All of it was changed at a tier: other copies are of no use."""
        self._whole(block, tier)
        for other in set(self[block].copies) - {tier}:
            self._leave(block, other)

    def free(self, request: Hashable) -> None:
        """Forget a request."""
        for block in [block for block in self.entries if block.request == request]:
            for tier in list(self.entries[block].copies):
                self._leave(block, tier)
            self._forget_selection(block)
            del self.entries[block]

    def check(self) -> None:
        """Raise AssertionError where the books do not balance."""
        held: Counter[str] = Counter()
        for block, entry in self.entries.items():
            assert self.tiers_of(block), f"{block} is nowhere whole"
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

    def _leave(self, block: BlockKey, tier: str) -> None:
        entry = self.entries[block]
        copy = entry.copies.pop(tier)
        nbytes = copy.tokens * entry.row_bytes
        self.used[tier] -= nbytes
        still = tuple(_pending([*copy.readers, *copy.arriving]))
        if still:
            self._leaving[tier].append((nbytes, still))
        if self._left:
            self._left(block, tier, still)

    def _take(self, tier: str, nbytes: int) -> list[Transfer]:
        """Count bytes as used; whose end must be waited for before they are there."""
        limit = self._tier(tier).limit_bytes
        if nbytes > self.free_bytes(tier):
            free = self.free_bytes(tier)
            raise PolicyError(f"{tier} is full: {nbytes:,} bytes are wanted, {free:,.0f} of {limit:,} are free")
        self.used[tier] += nbytes
        self.peak[tier] = max(self.peak[tier], self.used[tier])
        leaving = self._leaving[tier]
        left = deque(each for each in leaving if not all(transfer.done for transfer in each[1]))
        self._leaving[tier] = left
        if limit is None:
            return []
        waits: list[Transfer] = []
        over = self.used[tier] + sum(size for size, _ in left) - limit
        for size, transfers in left:
            if over <= 0:
                break
            waits += transfers
            over -= size
        return waits

    def _whole(self, block: BlockKey, tier: str) -> Replica:
        entry = self[block]
        copy = entry.copies.get(tier)
        if copy is None or copy.tokens < entry.tokens:
            has = f"{copy.tokens} of its {entry.tokens} tokens" if copy else "nothing of it"
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
    """Those that still use bytes."""
    return [transfer for transfer in transfers if not transfer.done]


def _missing(transfers: Iterable[Transfer]) -> list[Transfer]:
    """Those whose bytes are not there: they are under way, or never come."""
    return [transfer for transfer in transfers if transfer.failed or not transfer.done]
