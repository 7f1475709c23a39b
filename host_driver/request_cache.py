"""KV data of requests that decode together, with their own lengths, and a placement for each layer of each request."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch

from csd_spec import ModelShape
from host_driver.drive_tier import DriveTier
from host_driver.driver import Driver
from host_driver.kv_format import KVFormat
from host_driver.tiers import bounce_buffer_factory, first_bytes, round_to_blocks, stores
from kv_cache.block_table import BlockKey, PolicyError
from kv_cache.hardware import CSD, DEVICE
from kv_cache.iteration import IterationRunner, TierAssignment
from kv_cache.limits import TierLimits
from kv_cache.scheduler import Policy
from kv_cache.transfer.engine import AttendCall
from kv_cache.transfer.frames import CachedFiles
from kv_cache.transfer.policy_thread import PolicyThread
from kv_cache.transfer.real import RealTransfers

PART = "kv"  # keys and values of a token are adjacent: they move together


class RowKv:
    """A block table and a policy for all requests, and an iteration for each forward. Used by one thread.

    Every tier stores the same bytes, in `format`. With drives these are the drives' bytes, and attention on the device
    rounds as drives do, so tokens do not depend on the tiers. Without drives rows have the model's dtype. Data of
    sliding-window layers stays on the device in the model's dtype, outside of the tiers.
    """

    def __init__(
        self,
        tiers: TierLimits,
        shape: ModelShape,
        like: torch.Tensor,
        max_tokens: int,
        driver: Driver | None = None,
        cache_bytes: int = 0,
        policy: Policy = Policy(),
    ) -> None:
        """Create empty tiers.

        Args:
            tiers: Limits.
            shape: Shape of the layers in tiers.
            like: A parameter of the model, for its device and dtype.
            max_tokens: Maximum length of a request.
            driver: Driver of the drives, if there are any.
            cache_bytes: Size of the page cache, bytes.
            policy: Moves blocks in each iteration.
        """
        self.shape, self.max_tokens, self.device = shape, max_tokens, like.device
        self.format = KVFormat.of(shape, like.dtype, driver.attention if driver else None)
        self.row_bytes = self.format.row_bytes
        self.drives = DriveTier(driver, self.format, max_tokens) if driver else None
        # Keys and values on the device, by request and index of the sliding-window layer
        self.windows: dict[tuple[Hashable, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._policy_thread = PolicyThread()
        held = stores(tiers, self.device, CachedFiles(tiers.folder))
        if self.drives:
            held[CSD] = self.drives
        capacity = round_to_blocks(max_tokens * self.row_bytes)
        self.real = RealTransfers(
            held, lambda block: capacity, self._policy_thread.attend_layer, bounce_buffer_factory(self.device)
        )
        machine = tiers.machine(cache_bytes, drives=driver is not None)
        self.runner = IterationRunner(machine, range(shape.layers), policy.layers, self.real, parts=(PART,))

    @contextmanager
    def iteration(self, new: Mapping[Hashable, int], assignment: TierAssignment) -> Iterator[None]:
        """Run the policy along with one forward.

        Args:
            new: New tokens of each request.
            assignment: Tiers of each layer of any request from now on.

        Raises:
            PolicyError: A tier is too small; the stored data of these requests is then invalid.
        """
        for request, tokens in new.items():
            if (length := self.tokens(request) + tokens) > self.max_tokens:
                raise PolicyError(f"{length} tokens: must be at most max_tokens = {self.max_tokens}")
        decodes = self.drives is not None and set(new.values()) == {1}
        if decodes:
            self.real.settle(CSD)  # a step begins when the prompts before it are stored
        row_bytes = dict.fromkeys(new, self.row_bytes)
        self._policy_thread.start(lambda: self.runner.run(new, row_bytes, assignment))
        try:
            with self.drives.step() if self.drives and decodes else nullcontext():
                yield
            self._policy_thread.finish()
        except BaseException:
            self.runner.abandon()
            self._policy_thread.abandon()
            raise

    def enter_layer(self, layer: int, rows: int) -> Iterator[AttendCall]:
        """Called at a layer's attention: yields calls for the layer's `rows` rows when their data is ready."""
        while rows:
            attention = self._policy_thread.enter_layer(layer)
            yield attention
            rows -= len(attention.rows)
            assert rows >= 0, f"layer {layer}: the policy attends to more rows than there are"

    def stored(self, block: BlockKey) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a block on the device, (tokens, kv_heads, channels) each, as writable views."""
        tokens = self.runner.table[block].tokens
        flat = first_bytes(self.real.frame(block, DEVICE), tokens * self.row_bytes)
        return self.format.split(flat.view(self.format.value_dtype))

    def tokens(self, request: Hashable, layer: int = 0) -> int:
        """Stored tokens of a request; during a forward, those of a layer that is attended."""
        return sum(self.runner.table[block].tokens for block in self.blocks(request, layer))

    def blocks(self, request: Hashable, layer: int) -> list[BlockKey]:
        """Blocks of a layer of a request."""
        entries, blocks = self.runner.table.entries, list[BlockKey]()
        while (block := BlockKey(request, layer, PART, len(blocks))) in entries:
            blocks.append(block)
        return blocks

    def requests(self) -> set[Hashable]:
        """Requests that have KV data."""
        return {block.request for block in self.runner.table.entries}

    def free(self, request: Hashable) -> None:
        """Free a request."""
        self.real.settle()
        if self.drives:
            self.drives.forget(request)  # before its frames, which would crop each layer
        self.runner.free(request)
        self.real.forget(request)
        for key in [key for key in self.windows if key[0] == request]:
            del self.windows[key]

    def close(self) -> None:
        """Wait for transfers in flight and free everything."""
        for request in self.requests():
            self.free(request)
        self.real.close()
