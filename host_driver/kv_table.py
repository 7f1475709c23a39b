"""KV data of requests in tiers and drives: `KvTable`, the one owner of KV data on the host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from csd_spec import DriveError, ModelShape
from host_driver.batch import MicroBatch
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

PARTS = ("kv",)  # keys and values of a token move together


class KvTable:
    """A block table and a policy for all requests, and an iteration for each forward. One forward at a time.

    A request is one sequence. Its tokens are stored in the same format in every tier. With drives these are the drives'
    bytes, and attention on the device rounds as drives do, so tokens do not depend on the tiers. Data of sliding-window
    layers of a server stays on the device in the model's dtype, outside of the tiers.

    Attributes:
        drives: Drives as a tier; None: there are none.
        only_drives: Whether an attached model's KV data is in drives and nowhere else.
        windows: Keys and values on the device, by request and index of the sliding-window layer.
        where: Location of the KV data, for messages.
    """

    part = PARTS[0]

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
            kv_format: Format of requests; None: that of a model's own keys and values, told when they are opened.
            driver: Driver of the drives, if there are any.
        """
        self.tiers, self.policy, self.max_tokens, self.device = tiers, policy, max_tokens, like.device
        self.drives = DriveTier(driver, kv_format, max_tokens) if driver and kv_format else None
        self.only_drives, self.where = False, "in drives" if self.drives else "in tiers"
        self.windows: dict[tuple[Hashable, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.access = Exclusive(self.free, self.where)
        self._format, self._formats = kv_format, dict[Hashable, KVFormat]()
        self._policy_thread = PolicyThread()
        self._in_place = ""  # tier in which blocks stay and grow during this forward
        self.files = CachedFiles(tiers.folder)
        held = stores(tiers, self.device, self.files) | ({CSD: self.drives} if self.drives else {})
        self.real = RealTransfers(
            held,
            partial(_capacity, self._formats, max_tokens),
            self._policy_thread.attend_layer,
            bounce_buffer_factory(self.device),
        )
        self.runner = IterationRunner(
            tiers.machine(tiers.page_cache or 0, drives=self.drives is not None),
            range(layers),
            policy.layers,
            self.real,
            parts=PARTS,
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

    @classmethod
    def in_drives(cls, driver: Driver, like: torch.Tensor, max_tokens: int) -> KvTable:
        """A table for an attached model whose KV data is in drives and nowhere else."""
        table = cls.for_requests(TierLimits(), driver.shape, like, max_tokens, driver)
        table.only_drives = True
        return table

    @property
    def format(self) -> KVFormat:
        """Format of requests that are not opened with their own."""
        assert self._format, "the model's own format is known with its first keys"
        return self._format

    def open(self, requests: Sequence[Hashable], kv_format: KVFormat | None = None) -> None:
        """Add requests that belong together. `kv_format`: their format, if it is not the table's."""
        self._formats |= dict.fromkeys(requests, kv_format or self.format)
        if self.drives:
            with self.drives.lock:
                self.drives.create(requests)

    @contextmanager
    def iteration(self, new: Mapping[Hashable, int], assignment: TierAssignment) -> Iterator[MicroBatch | None]:
        """Run the policy along with one forward of sequences (see `begin`); yields the step in drives, if it is one."""
        decodes = self.drives is not None and set(new.values()) == {1}
        if decodes:
            self.real.settle(CSD)  # a step begins when the prompts before it are stored
        self.begin(new, assignment)
        try:
            with self.drives.step() if self.drives and decodes else nullcontext([None]) as (micro_batch,):
                yield micro_batch
            shipped = self._in_place == CSD and not decodes
            self.finish()
            if shipped:
                self.settle(new)  # an error is that of these requests
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
            if request not in self._formats:
                self._formats[request] = self.format
            if (length := self.tokens(request) + tokens) > self.max_tokens:
                raise PolicyError(
                    f"{length} tokens: must be at most max_tokens = {self.max_tokens}: raise it with "
                    "TierLimits(max_tokens=...)"
                )
        row_bytes = {request: self._formats[request].row_bytes for request in new}
        if (
            assignment
            and self._stays_in_place(new, assignment)
            and self.runner.grow_in_place(new, row_bytes, assignment.only_tier)
        ):
            self._in_place = assignment.only_tier
            return
        self._run_policy(lambda: self._policy_thread.start(lambda: self.runner.run(new, row_bytes, assignment)))

    def _stays_in_place(self, new: Mapping[Hashable, int], assignment: TierAssignment) -> bool:
        """Whether a placement moves no block, if all are in its tier already."""
        if self.policy.has_layers or not assignment.only_tier:
            return False
        if assignment.only_tier == CSD:
            return True  # requests that pause stay there as well
        return set(new.values()) == {1} and self._formats.keys() <= assignment.placed

    def stay_in_drives(self) -> None:
        """Begin a forward without a program, whose new tokens are stored in drives: see `store_in_drives`."""
        self._in_place = CSD

    def store_in_drives(self, new: Mapping[Hashable, int], layers: range) -> None:
        """Account for tokens of requests that were stored in drives without a program, in these layers."""
        row_bytes = {request: self._formats[request].row_bytes for request in new}
        stored = not new or self.runner.grow_in_place(new, row_bytes, CSD, layers)
        assert stored, "tokens were stored in drives where a block is elsewhere"

    def enter_layer(self, layer: int) -> AttendCall:
        """Called at a layer's attention: returns the policy's next call for it, when its data is ready."""
        attention = self._run_policy(lambda: self._policy_thread.enter_layer(layer))
        assert isinstance(attention, AttendCall)
        return attention

    def enter_rows(self, layer: int, requests: Sequence[Hashable]) -> Iterator[AttendCall]:
        """Called at a layer's attention: yields calls for these requests when their data is ready."""
        if self._in_place:
            yield AttendCall(layer, tuple(requests), (self._in_place,), "dense", (), ())
            return
        rows = len(requests)
        while rows:
            attention = self.enter_layer(layer)
            yield attention
            rows -= len(attention.rows)
            assert rows >= 0, f"layer {layer}: the policy attends to more rows than there are"

    def finish(self) -> None:
        """End a forward."""
        if not self._in_place:
            self._run_policy(self._policy_thread.finish)
        self._in_place = ""

    def settle(self, requests: Collection[Hashable]) -> None:
        """Wait until the tokens of requests are stored in their tiers; raises the error of a failed copy or drive."""
        self.real.settle()
        if self.drives:
            with self.drives.lock:
                self.drives.driver.settle()
        entries = (entry for block, entry in self.runner.table.entries.items() if block.request in requests)
        self.real.wait(transfer for entry in entries for copy in entry.copies.values() for transfer in copy.arriving)

    def abandon(self) -> None:
        """End a failed forward."""
        self._in_place = ""
        self.runner.abandon()
        self._policy_thread.abandon()

    def stored(self, block: BlockKey) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a block on the device, (tokens, kv_heads, channels) each, as writable views."""
        kv_format, tokens = self._formats[block.request], self.runner.table[block].tokens
        flat = first_bytes(self.real.frame(block, DEVICE), tokens * kv_format.row_bytes)
        return kv_format.split(flat.view(kv_format.value_dtype))

    def tokens(self, request: Hashable, layer: int = 0) -> int:
        """Stored tokens of a request; during a forward, those of a layer that is attended."""
        return sum(self.runner.table[block].tokens for block in self.blocks(request, layer))

    def blocks(self, request: Hashable, layer: int) -> list[BlockKey]:
        """Blocks of a layer of a request."""
        entries, blocks = self.runner.table.entries, list[BlockKey]()
        while (block := BlockKey(request, layer, self.part, len(blocks))) in entries:
            blocks.append(block)
        return blocks

    def requests(self) -> set[Hashable]:
        """Requests that have KV data."""
        return {block.request for block in self.runner.table.entries}

    def rewrite(self, block: BlockKey) -> None:
        """Tell the policy that the rows of a block were reordered on the device."""
        self.runner.rewrite(block, DEVICE)

    def crop(self, layer: int, tokens: Mapping[Hashable, int]) -> None:
        """Keep the first tokens of a layer of requests, each of which is one block."""
        self.real.settle()
        if self.drives:
            self.drives.crop(layer, tokens)
        for request, count in tokens.items():
            for block in self.blocks(request, layer):
                assert not block.index, "a request in several blocks is not cropped"
                self.runner.crop(block, count)
                self.real.crop(block, count * self._formats[request].row_bytes)

    def free(self, requests: Collection[Hashable]) -> None:
        """Free requests; no effect after `close`, which has freed all."""
        self.real.settle()
        if self.drives:
            self.drives.free(requests)  # before their frames, which would crop each layer
        for request in requests:
            self.runner.free(request)
            self.real.forget(request)
            self._formats.pop(request, None)
        for key in [key for key in self.windows if key[0] in requests]:
            del self.windows[key]

    def close(self) -> None:
        """Wait for transfers in flight and free everything."""
        with self.access.hold():
            self.free(self.requests())
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

    def _run_policy(self, call: Callable[[], Any]) -> Any:
        """Run the policy; any exception of its own becomes one PolicyError with its name."""
        try:
            return call()
        except (OSError, PolicyError, DriveError):
            raise
        except Exception as error:
            raise PolicyError(f"policy {self.policy.name}: {type(error).__name__}: {error}") from error


def _capacity(formats: Mapping[Hashable, KVFormat], max_tokens: int, block: BlockKey) -> int:
    """Maximum size of a block, bytes."""
    return round_to_blocks(max_tokens * formats[block.request].row_bytes)
