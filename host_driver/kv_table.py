"""KV data of requests in tiers and drives: `KvTable`, the one owner of KV data on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from csd_spec import DriveError, ModelShape
from host_driver.device_memory import bounce_buffer_factory, first_bytes, round_to_blocks, stores
from host_driver.drive_tier import DriveTier
from host_driver.driver import Driver
from host_driver.exclusive import Exclusive
from host_driver.kv_format import KVFormat
from kv_cache.block_table import BlockKey, PolicyError
from kv_cache.hardware import CSD, DEVICE
from kv_cache.iteration import IterationRunner, TierAssignment
from kv_cache.limits import TierLimits
from kv_cache.replay import replay
from kv_cache.scheduler import Policy
from kv_cache.transfer.engine import AttendCall
from kv_cache.transfer.frames import CachedFiles
from kv_cache.transfer.policy_thread import PolicyThread
from kv_cache.transfer.real import RealTransfers
from kv_cache.transfer.simulated import LayerTime, SimulatedTransfers

SEPARATE, TOGETHER = ("k", "v"), ("kv",)  # parts of a token: keys and values move apart, or together


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape and dtype of one part of one token of a layer: (B, H, d) of a batch, or (values,) of a request."""

    rows: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes per token."""
        return math.prod(self.rows) * self.dtype.itemsize


class KvTable:
    """A block table and a policy for all requests, and an iteration for each forward. One forward at a time.

    A request is a batch that is kept together (`open`), or one sequence of the table's `format`. In that format every
    tier stores the same bytes. With drives these are the drives' bytes, and attention on the device rounds as drives
    do, so tokens do not depend on the tiers. Data of sliding-window layers stays on the device in the model's dtype,
    outside of the tiers.

    Attributes:
        drives: Drives as a tier; None: there are none.
        windows: Keys and values on the device, by request and index of the sliding-window layer.
    """

    def __init__(
        self,
        tiers: TierLimits,
        policy: Policy,
        layers: int,
        like: torch.Tensor,
        max_tokens: int,
        kv_format: KVFormat | None = None,
        driver: Driver | None = None,
    ) -> None:
        """Create empty tiers.

        Args:
            tiers: Limits; a page cache of unknown size counts as none.
            policy: Moves blocks in each iteration.
            layers: Number of the model's layers in tiers.
            like: A parameter of the model, for its device.
            max_tokens: Maximum length of a request.
            kv_format: Format of sequences.
            driver: Driver of the drives, if there are any.
        """
        self.tiers, self.policy, self.max_tokens, self.device = tiers, policy, max_tokens, like.device
        self._format, self._shapes = kv_format, dict[Hashable, Shape]()
        self.drives = DriveTier(driver, kv_format, max_tokens) if driver and kv_format else None
        self.windows: dict[tuple[Hashable, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.access = Exclusive(self.free, "in tiers")
        self._policy_thread = PolicyThread()
        self._in_place: AttendCall | None = None  # of the forward, if no block moves in it
        self.files = CachedFiles(tiers.folder)
        held = stores(tiers, self.device, self.files) | ({CSD: self.drives} if self.drives else {})
        self.real = RealTransfers(
            held, self._capacity, self._policy_thread.attend_layer, bounce_buffer_factory(self.device)
        )
        self.runner = IterationRunner(
            tiers.machine(tiers.page_cache or 0, drives=driver is not None),
            range(layers),
            policy.layers,
            self.real,
            parts=TOGETHER if kv_format else SEPARATE,
            final_tokens=0 if kv_format else max_tokens,
        )

    @classmethod
    def for_requests(
        cls,
        tiers: TierLimits,
        shape: ModelShape,
        like: torch.Tensor,
        max_tokens: int,
        driver: Driver | None = None,
        policy: Policy = Policy(),
    ) -> KvTable:
        """A table for sequences of a model, whose dtype is that of `like`."""
        kv_format = KVFormat.of(shape, like.dtype, driver.attention if driver else None)
        return cls(tiers, policy, shape.layers, like, max_tokens, kv_format, driver)

    @property
    def format(self) -> KVFormat:
        """Format of sequences."""
        assert self._format, "all requests of this table are batches"
        return self._format

    def open(self, request: Hashable, shape: Shape) -> None:
        """Add a batch of this shape."""
        self._shapes[request] = shape

    @contextmanager
    def iteration(self, new: Mapping[Hashable, int], assignment: TierAssignment) -> Iterator[None]:
        """Run the policy along with one forward of sequences; see `begin`."""
        decodes = self.drives is not None and set(new.values()) == {1}
        if decodes:
            self.real.settle(CSD)  # a step begins when the prompts before it are stored
        self.begin(new, assignment)
        try:
            with self.drives.step() if self.drives and decodes else nullcontext():
                yield
            self.finish()
        except BaseException:
            self.abandon()
            raise

    def begin(self, new: Mapping[Hashable, int], assignment: TierAssignment | None = None) -> None:
        """Start the policy's program of an iteration.

        Args:
            new: New tokens of each request.
            assignment: Tiers of each layer of any request from now on; None: the policy places blocks itself.

        Raises:
            PolicyError: A tier is too small; the stored data of these requests is then invalid.
        """
        for request, tokens in new.items():
            if request not in self._shapes:
                self.open(request, Shape((self.format.values,), self.format.value_dtype))
            if (length := self.tokens(request) + tokens) > self.max_tokens:
                raise PolicyError(
                    f"{length} tokens: must be at most max_tokens = {self.max_tokens}: raise it with "
                    "TierLimits(max_tokens=...)"
                )
        if assignment and self._decodes_in_place(new, assignment):
            self._in_place = AttendCall(0, tuple(new), (assignment.only_tier,), "dense", (), ())
            return
        row_bytes = {request: self._shapes[request].row_bytes for request in new}
        self._run_policy(lambda: self._policy_thread.start(lambda: self.runner.run(new, row_bytes, assignment)))

    def _decodes_in_place(self, new: Mapping[Hashable, int], assignment: TierAssignment) -> bool:
        """Whether no block moves in an iteration, so that it needs no program; it is accounted for then."""
        if self.policy.has_layers or not assignment.only_tier or set(new.values()) != {1}:
            return False
        if not self._shapes.keys() <= assignment.placed:
            return False
        return self.runner.decode_in_place(new.keys(), assignment.only_tier)

    def enter_layer(self, layer: int) -> AttendCall:
        """Called at a layer's attention: returns the policy's next call for it, when its data is ready."""
        if self._in_place:
            return replace(self._in_place, layer=layer)
        attention = self._run_policy(lambda: self._policy_thread.enter_layer(layer))
        assert isinstance(attention, AttendCall)
        return attention

    def enter_rows(self, layer: int, rows: int) -> Iterator[AttendCall]:
        """Called at a layer's attention: yields calls for the layer's `rows` requests when their data is ready."""
        while rows:
            attention = self.enter_layer(layer)
            yield attention
            rows -= len(attention.rows)
            assert rows >= 0, f"layer {layer}: the policy attends to more rows than there are"

    def finish(self) -> None:
        """End a forward."""
        if not self._in_place:
            self._run_policy(self._policy_thread.finish)
        self._in_place = None

    def abandon(self) -> None:
        """End a failed forward."""
        self._in_place = None
        self.runner.abandon()
        self._policy_thread.abandon()

    def device_rows(self, block: BlockKey, tokens: int) -> torch.Tensor:
        """The first tokens of a block on the device, (tokens, *shape), as a writable view."""
        shape = self._shapes[block.request]
        flat = first_bytes(self.real.frame(block, DEVICE), tokens * shape.row_bytes)
        return flat.view(shape.dtype).view(tokens, *shape.rows)

    def stored(self, block: BlockKey) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a sequence's block on the device, (tokens, kv_heads, channels) each, as writable views."""
        return self.format.split(self.device_rows(block, self.runner.table[block].tokens))

    def tokens(self, request: Hashable, layer: int = 0) -> int:
        """Stored tokens of a request; during a forward, those of a layer that is attended."""
        return sum(self.runner.table[block].tokens for block in self.blocks(request, layer))

    def blocks(self, request: Hashable, layer: int) -> list[BlockKey]:
        """Blocks of the first part of a layer of a request."""
        entries, blocks = self.runner.table.entries, list[BlockKey]()
        while (block := BlockKey(request, layer, self.runner.parts[0], len(blocks))) in entries:
            blocks.append(block)
        return blocks

    def requests(self) -> set[Hashable]:
        """Requests that have KV data."""
        return {block.request for block in self.runner.table.entries}

    def rewrite(self, block: BlockKey) -> None:
        """Tell the policy that the rows of a block were reordered on the device."""
        self.runner.rewrite(block, DEVICE)

    def crop(self, request: Hashable, layer: int, tokens: int) -> None:
        """Keep the first tokens of a layer of a request, which is one block."""
        with self.access.hold():
            self.real.settle()
            for part in self.runner.parts:
                block = BlockKey(request, layer, part)
                self.runner.crop(block, tokens)
                self.real.crop(block, tokens * self._shapes[request].row_bytes)

    def free(self, request: Hashable) -> None:
        """Free a request; no effect after `close`, which has freed all."""
        self.real.settle()
        if self.drives:
            self.drives.forget(request)  # before its frames, which would crop each layer
        self.runner.free(request)
        self.real.forget(request)
        self._shapes.pop(request, None)
        for key in [key for key in self.windows if key[0] == request]:
            del self.windows[key]

    def close(self) -> None:
        """Wait for transfers in flight and free everything."""
        with self.access.hold():
            for request in self.requests():
                self.free(request)
            self.real.close()

    def simulated_bytes(self) -> dict[str, int] | None:
        """Bytes by route of the recorded actions in simulated time; None if not recorded."""
        run = self.runner
        if run.recorded is None:
            return None
        modelled = SimulatedTransfers(run.machine, lambda attention: LayerTime(0))
        replay(run.recorded, run.machine, modelled, run)
        modelled.settle()
        return dict(modelled.moved)

    def _capacity(self, block: BlockKey) -> int:
        return round_to_blocks(self.max_tokens * self._shapes[block.request].row_bytes)

    def _run_policy(self, call: Callable[[], Any]) -> Any:
        """Run the policy; any exception of its own becomes one PolicyError with its name."""
        try:
            return call()
        except (OSError, PolicyError, DriveError):
            raise
        except Exception as error:
            raise PolicyError(f"policy {self.policy.name}: {type(error).__name__}: {error}") from error
