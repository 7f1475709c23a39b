"""Iterations: a policy is a function that runs one iteration of a batch as a short program of copies and attention.

`attend` is called in the order of layers. A copy starts at once; its transfer can be waited for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from kv_cache.block_table import BlockKey, BlockTable, CopyRange, PolicyError, Transfer
from kv_cache.hardware import DEVICE, Machine, Route
from kv_cache.transfer.engine import Action, AttendCall, IterationRecord, TransferEngine

Program = Callable[["Iteration"], None]
Plan = Callable[[int], Sequence[Hashable]]
Tiers = tuple[str, ...]  # tier of each block of a layer


@dataclass(slots=True)
class Counts:
    """Traffic on a route: number of copies, and bytes in whole blocks."""

    copies: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class TierAssignment:
    """Where a policy's `schedule` keeps the KV data of requests.

    Attributes:
        tiers: Returns the tier of each block of a layer of a request.
        buffers: Returns the number of offloaded layers of a request that the device holds at once.
        placed: Requests that have a tier of their own; the others pause.
        only_tier: Tier of all layers of these, if there is just one.
    """

    tiers: Callable[[Hashable, int], Tiers]
    buffers: Callable[[Hashable], int] = lambda request: 2
    placed: Set[Hashable] = frozenset()
    only_tier: str = ""


@dataclass(slots=True)
class IterationRunner:
    """Runs a policy for iteration after iteration on one block table.

    Attributes:
        parts: Parts of each layer of a request: keys and values separately, or together.
        plan: Requests that run in k iterations; None: always the same batch.
        final_tokens: Final length of a request, tokens; 0: unknown.
        below: Tier for blocks that leave the device.
        recorded: Record of all actions if it is a list; None: not recorded.
        now: The current iteration, or the last one.
    """

    machine: Machine
    layers: range
    policy: Program
    transfers: TransferEngine
    parts: tuple[str, ...] = ("k", "v")
    plan: Plan | None = None
    final_tokens: int = 0
    table: BlockTable = field(init=False)
    below: str = field(init=False)
    traffic: dict[str, Counts] = field(default_factory=dict)
    iterations: int = 0
    recorded: list[IterationRecord] | None = None
    now: Iteration | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.table = BlockTable(self.machine.tiers, self.transfers.release)
        self.below = self.machine.below_device

    def run(
        self, new: Mapping[Hashable, int], row_bytes: Mapping[Hashable, int], assignment: TierAssignment | None = None
    ) -> None:
        """Run an iteration.

        Args:
            new: New tokens of each request.
            row_bytes: Bytes per token of one part, of each request.
            assignment: Decision of `schedule`; None: there is none.

        Raises:
            PolicyError: The policy requests something that the block table forbids.
        """
        iteration = self.now = Iteration(self, self.iterations, dict(new), dict(row_bytes), assignment)
        self.iterations += 1
        if self.recorded is not None:
            self.recorded.append(IterationRecord(new, row_bytes, iteration.acts))
        try:
            self.policy(iteration)
            iteration.end()
        finally:
            iteration.over = True
        self.transfers.end()

    def grow_in_place(
        self,
        new: Mapping[Hashable, int],
        row_bytes: Mapping[Hashable, int],
        tier: str,
        layers: Iterable[int] | None = None,
    ) -> bool:
        """Account for an iteration without a program, in which all blocks are, grow and stay in a tier.

        Args:
            new: New tokens of each request.
            row_bytes: Bytes per token of one part, of each request.
            tier: Tier of all blocks.
            layers: Layers that grow; None: all.

        Returns:
            Whether it is one, to which the program of a placement would add nothing; if not, nothing has changed.
        """
        spec = self.machine.tiers.get(tier)  # the program says what is wrong with an unknown one
        if self.recorded is not None or not new or spec is None or not spec.attends:
            return False
        if any(BlockKey(request, self.layers.start, self.parts[0], 1) in self.table.entries for request in new):
            return False  # a second block
        layers = self.layers if layers is None else layers
        blocks = {
            BlockKey(request, layer, part): (tokens, row_bytes[request])
            for request, tokens in new.items()
            for layer in layers
            for part in self.parts
        }
        if not self.table.grow_in_place(blocks, tier, self.iterations):
            return False
        self.iterations += 1
        return True

    def set_limits(self, limits: Mapping[str, int]) -> None:
        """Change limits of tiers, bytes. Tiers above the new limit accept nothing until enough blocks have left."""
        self.machine = self.machine.with_limits(limits)
        self.table.tiers = self.machine.tiers
        self.transfers.set_tiers(self.machine.tiers)

    def abandon(self) -> None:
        """Stop the current iteration: further actions of its policy are refused."""
        if self.now:
            self.now.over = True

    def rewrite(self, block: BlockKey, tier: str) -> None:
        """Drop the other copies of a block whose rows were reordered by attention in a tier."""
        self.table.drop_stale_copies(block, tier)
        if self.recorded:
            self.recorded[-1].acts.append(Action("rewrite", tier, block))

    def crop(self, block: BlockKey, tokens: int) -> None:
        """Keep only the first `tokens` tokens of a block without transfers in flight."""
        self.table.crop(block, tokens)
        self._record_action(Action("crop", block=block, tokens=tokens))

    def free(self, request: Hashable) -> None:
        """Remove all blocks of a request."""
        self.table.free(request)
        self._record_action(Action("free", rows=(request,)))

    def _record_action(self, act: Action) -> None:
        if self.recorded is not None:
            self.recorded.append(IterationRecord({}, {}, [act]))

    def route(self, source: str, target: str) -> Route:
        """The route between two tiers; raises PolicyError."""
        try:
            return self.machine.routes[source, target]
        except KeyError:
            raise PolicyError(f"there is no route from {source} to {target}") from None


class Iteration:
    """One iteration, the interface of a policy: queries, copies, drops, attention.

    Attributes:
        new: New tokens of each request of the batch: 1 in decode, more in prefill.
        below: Tier for blocks that leave the device: host memory, or buffered files if only these have memory.
    """

    def __init__(
        self,
        run: IterationRunner,
        number: int,
        new: dict[Hashable, int],
        row_bytes: dict[Hashable, int],
        assignment: TierAssignment | None = None,
    ) -> None:
        self._run, self.number, self.new, self._row_bytes = run, number, MappingProxyType(new), row_bytes
        self.batch, self.layers, self.below, self._assignment = tuple(new), run.layers, run.below, assignment
        self.acts: list[Action] = []
        self._copies: dict[int, int] = {}  # index into `acts` by id of the transfer
        self.over = False
        self._next = dict.fromkeys(self.batch, self.layers.start)

    # Queries of a policy

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts of a layer of a request, in the order in which attention needs them."""
        return self._run.parts

    @property
    def prefill(self) -> bool:
        """Whether a request gets more than one token."""
        return any(count > 1 for count in self.new.values())

    @property
    def final_tokens(self) -> int:
        """Final length of a request, tokens; 0 if unknown."""
        return self._run.final_tokens

    @property
    def assignment(self) -> TierAssignment:
        """Decision of `schedule`; raises PolicyError if there is none, as under a model without a scheduler."""
        if self._assignment is None:
            raise PolicyError("this policy executes the placement of a scheduler: run it in a server (vcsd.serve)")
        return self._assignment

    def plan(self, k: int) -> Sequence[Hashable]:
        """Requests that run in k iterations."""
        return self.batch if self._run.plan is None else self._run.plan(self.number + k)

    def next_use(self, block: BlockKey, horizon: int = 64) -> int | None:
        """Iterations until a block is used again; None if more than `horizon`."""
        return next((k for k in range(horizon) if block.request in self.plan(k)), None)

    def blocks(self, layer: int, requests: Iterable[Hashable] | None = None) -> list[BlockKey]:
        """Blocks of a layer, of the batch or of other requests; ordered by part, then by request."""
        wanted = self.batch if requests is None else list(requests)
        return [block for part in self.parts for request in wanted for block in self._blocks(request, layer, part)]

    def tokens(self, block: BlockKey) -> int:
        """Tokens of a block."""
        return self._run.table[block].tokens

    def nbytes(self, block: BlockKey, tokens: int | None = None) -> int:
        """Bytes of a block, now or with `tokens` tokens."""
        entry = self._run.table[block]
        return (entry.tokens if tokens is None else tokens) * entry.row_bytes

    def layer_bytes(self, tokens: int | None = None) -> int:
        """Bytes of all parts of one layer of the batch, at `tokens` per request (None: after this iteration)."""

        def length(request: Hashable) -> int:
            stored = self._blocks(request, self.layers.start, self.parts[0])
            return sum(map(self.tokens, stored)) + self.new[request]

        rows = ((length(r) if tokens is None else tokens) * self._row_bytes[r] for r in self.batch)
        return len(self.parts) * sum(rows)

    def missing_bytes(self, block: BlockKey, tier: str) -> int:
        """Bytes of a block that a tier does not have."""
        entry = self._run.table[block]
        copy = entry.copies.get(tier)
        return (entry.tokens - (copy.tokens if copy else 0)) * entry.row_bytes

    def new_bytes(self, request: Hashable) -> int:
        """Bytes that this iteration adds to one part of a layer of a request."""
        return self.new[request] * self._row_bytes[request]

    def tiers_of(self, block: BlockKey) -> tuple[str, ...]:
        """Tiers with a complete copy of a block, including tokens in flight."""
        return self._run.table.tiers_of(block)

    def last_use(self, block: BlockKey) -> int:
        """Last iteration that attended a block."""
        return self._run.table[block].used

    def blocks_at(self, tier: str) -> list[BlockKey]:
        """Blocks in a tier, the least recently attended first; among these, later layers first."""
        entries = self._run.table.entries
        here = [block for block, entry in entries.items() if tier in entry.copies]
        return sorted(here, key=lambda block: (entries[block].used, -block.layer))

    def free_bytes(self, tier: str) -> float:
        """Free bytes of a tier."""
        return self._run.table.free_bytes(tier)

    def capacity(self, tier: str) -> float:
        """Capacity of a tier, bytes: its limit or the size of its page cache, whichever is smaller."""
        if tier not in self._run.machine.tiers:
            raise PolicyError(f"there is no tier {tier!r}: there are {', '.join(self._run.machine.tiers)}")
        spec = self._run.machine.tiers[tier]
        sizes = [size for size in (spec.limit_bytes, spec.cache_bytes) if size is not None]
        return min(sizes) if sizes else float("inf")

    def has_path(self, source: str, target: str) -> bool:
        """Whether a route leads from one tier to another."""
        return (source, target) in self._run.machine.routes

    def queued_s(self, source: str, target: str) -> float:
        """Time of the transfers in flight on a route, seconds."""
        return self._run.transfers.queued_s(self._run.route(source, target))

    def transfer_s(self, source: str, target: str, nbytes: int) -> float:
        """Time of a copy that has the route to itself, seconds."""
        return self._run.transfers.transfer_s(self._run.route(source, target), nbytes)

    def layer_s(self) -> float:
        """Recent time of a layer without waiting, seconds."""
        return self._run.transfers.layer_s()

    def page_cache_hits(self, tier: str) -> tuple[int, int] | None:
        """Bytes read from a tier's files so far, and bytes of these from the page cache; None if unknown."""
        return self._run.transfers.page_cache_hits(tier)

    @property
    def can_select(self) -> bool:
        """Whether single tokens of a block can be copied (`select`)."""
        return self._run.transfers.selects

    # Actions of a policy

    def copy(
        self,
        block: BlockKey,
        to: str,
        *,
        source: str | None = None,
        urgency: float = 0.0,
        fifo: bool = False,
        after: Iterable[Transfer] = (),
    ) -> Transfer | None:
        """Copy the part of a block that a tier does not have; returns None if it has the whole block.

        Args:
            source: Source tier; None: the fastest that has a complete copy.
            urgency: Priority on shared links; larger is first. fifo: Queue on the first link instead of sharing it.
            after: Copies that have to finish first.
        """
        run = self._open()
        where = run.table.tiers_of(block)
        if to in where:
            return None
        sources = [tier for tier in where if self.has_path(tier, to)]
        if not sources:
            raise PolicyError(f"{block}: there is no route from {' or '.join(where)} to {to}")
        if source is None:
            size = self.nbytes(block)
            source = min(sources, key=lambda tier: self.transfer_s(tier, to, size))
        route, urgency = run.route(source, to), float(urgency)
        before = [transfer for transfer in after if not transfer.done]
        copy_range = run.table.copy(block, source, to)
        if before:
            copy_range = replace(copy_range, after=(*copy_range.after, *before))
        try:
            transfer = run.transfers.begin(copy_range, route, fifo, urgency)
        except BaseException:
            run.table.cancel_copy(copy_range)
            raise
        run.table.start_copy(copy_range, transfer)
        numbers = tuple(self._copies[id(earlier)] for earlier in before if id(earlier) in self._copies)
        self._copies[id(transfer)] = len(self.acts)
        self.acts.append(Action("copy", to, block, source, fifo, after=numbers))
        self._count(copy_range, route)
        return transfer

    def select(self, block: BlockKey, to: str, tokens: int, *, urgency: float = 0.0) -> Transfer:
        """Copy some tokens of a block to a tier for its next attention, with `attend` at the tier of the block.

        They are not a copy of it. New tokens are created on the device and copied to its tier. Simulated time only."""
        run = self._open()
        source = run.table.tiers_of(block)[0]
        route = run.route(source, to)
        copy_range = run.table.select(block, source, to, tokens)
        transfer = run.transfers.begin(copy_range, route, False, urgency)
        run.table.start_select(copy_range, transfer)
        self.acts.append(Action("select", to, block, source, tokens=tokens))
        self._count(copy_range, route)
        return transfer

    def _count(self, copy_range: CopyRange, route: Route) -> None:
        """Count a copy as traffic."""
        row = copy_range.row_bytes
        first, end = route.blocks(copy_range.first * row, (copy_range.first + copy_range.tokens) * row)
        counts = self._run.traffic.setdefault(route.name, Counts())
        counts.copies += 1
        counts.bytes += end - first

    def drop(self, block: BlockKey, at: str) -> None:
        """Drop a copy that is not the last complete one."""
        self._open().table.drop(block, at)
        self.acts.append(Action("drop", at, block))

    def move(self, block: BlockKey, to: str, *, urgency: float = 0.0, fifo: bool = False) -> Transfer | None:
        """Copy a block to a tier and drop all its other copies."""
        transfer = self.copy(block, to, urgency=urgency, fifo=fifo)
        for tier in list(self._run.table[block].copies):
            if tier != to:
                self.drop(block, tier)
        return transfer

    def wait(self, *transfers: Transfer | None) -> None:
        """Make the model wait for copies."""
        self._run.transfers.wait([transfer for transfer in transfers if transfer is not None])

    def attend(
        self,
        layer: int,
        rows: Iterable[Hashable] | None = None,
        at: str | tuple[str, ...] = DEVICE,
        method: str = "dense",
        read: float = 1.0,
    ) -> None:
        """Compute one layer for `rows` (None: the batch); its KV blocks must be in the given tier or in flight to it.

        New tokens are created in that tier. Partial results of several blocks are merged.

        Args:
            at: Tier, or the tier of each block of a request. New tokens go to the last block; one tier more than there
                are blocks starts a new block.
            method: Attention method, for drives.
            read: Fraction of the tokens that attention takes the time of.
        """
        run, wanted = self._open(), self.batch if rows is None else tuple(rows)
        tiers = (at,) if isinstance(at, str) else tuple(at)
        for row in wanted:
            if self._next.get(row) != layer:
                due = f"layer {self._next[row]} is due" if row in self._next else "it is not in this iteration"
                raise PolicyError(f"attend(layer {layer}) of request {row}: {due}")
            self._next[row] = layer + 1
        room = [transfer for row in wanted for part in self.parts for transfer in self._grow(row, layer, part, tiers)]
        blocks = self.blocks(layer, wanted)
        waits = [
            transfer
            for block, tier in enumerate(tiers)
            for transfer in run.table.attend([key for key in blocks if key.index == block], tier, self.number)
        ]
        self.acts.append(Action("attend", tiers=tiers, layer=layer, rows=wanted, method=method, read=read))
        selected = [block for block in blocks if block in run.table.selected]
        call = AttendCall(layer, wanted, tiers, method, tuple(blocks), tuple(waits), tuple(room), read)
        try:
            run.transfers.attend(call)
        finally:
            run.table.end_attention(blocks)
        for block in selected:
            self._write(block, tiers[block.index])

    def _write(self, block: BlockKey, tier: str) -> None:
        """Copy the new tokens of a block that was attended by selection from the device to its tier."""
        run, entry, new = self._run, self._run.table[block], self.new[block.request]
        route = run.route(DEVICE, tier)
        copy_range = CopyRange(block, DEVICE, tier, entry.tokens - new, new, entry.row_bytes, (), ())
        run.table.start_write(block, tier, run.transfers.begin(copy_range, route, False, 0.0))
        self._count(copy_range, route)

    def _grow(self, row: Hashable, layer: int, part: str, tiers: tuple[str, ...]) -> list[Transfer]:
        """Append a row's new tokens to block `len(tiers) - 1`; returns transfers that still use the space."""
        table, last = self._run.table, BlockKey(row, layer, part, len(tiers) - 1)
        blocks = len(self._blocks(row, layer, part))
        if blocks not in (len(tiers) - 1, len(tiers)):
            raise PolicyError(f"attend(layer {layer}) of request {row}: it has {blocks} blocks, not {len(tiers)}")
        if last not in table.entries:
            table.add(last, self._row_bytes[row], tiers[-1])
        return table.grow(last, tiers[-1], self.new[row])

    def _blocks(self, request: Hashable, layer: int, part: str) -> list[BlockKey]:
        """Blocks of one part of a layer of a request."""
        every = (BlockKey(request, layer, part, block) for block in itertools.count())
        return list(itertools.takewhile(lambda block: block in self._run.table.entries, every))

    def _open(self) -> IterationRunner:
        """The runner; raises PolicyError if this iteration is over."""
        if self.over:
            raise PolicyError(f"iteration {self.number} is over: a policy acts only in the current one")
        return self._run

    def end(self) -> None:
        """Raise PolicyError if the policy left a layer out."""
        for row, layer in self._next.items():
            if layer != self.layers.stop:
                raise PolicyError(f"the policy ended its iteration before layer {layer} of request {row} was attended")
