"""K and V of requests that decode side by side, each of its own length, each layer of each where it is to lie."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager

import torch

from csd_spec import ModelShape
from host_driver.drive_tier import DriveTier
from host_driver.driver import Driver
from host_driver.kv_format import KVFormat
from host_driver.tiers import bounce_of, first_bytes, in_blocks, stores
from kv_cache.block_table import BlockKey, PolicyError
from kv_cache.carry_out import Homes, carry_out
from kv_cache.hardware import CSD, DEVICE, HOST, PAGE_CACHE
from kv_cache.iteration import IterationRunner, Program
from kv_cache.limits import TierLimits
from kv_cache.transfer.engine import AttendCall
from kv_cache.transfer.frames import CachedFiles
from kv_cache.transfer.policy_thread import PolicyThread
from kv_cache.transfer.real import RealTransfers

PART = "kv"  # K and V of a token follow each other: they move together


class RowKv:
    """A table and a policy for all requests, and an iteration for each forward. Used by one thread.

    Every tier has the same bytes, those of `format`. With drives these are what drives store, and attention on the
    device rounds as drives do: so tokens do not depend on the tiers that rows are stored in. Without them rows have the
    model's dtype. What layers of windows see is kept on the device as the model has it, and is no part of the tiers.
    """

    def __init__(
        self,
        tiers: TierLimits,
        shape: ModelShape,
        like: torch.Tensor,
        max_tokens: int,
        driver: Driver | None = None,
        cache_bytes: int = 0,
        program: Program = carry_out,
    ) -> None:
        """like: a parameter of the model, for its device and its dtype. max_tokens: of a request."""
        self.shape, self.max_tokens, self.device = shape, max_tokens, like.device
        self.format = KVFormat.of(shape, like.dtype, driver.attention if driver else None)
        self.row_bytes = self.format.row_bytes
        self.drives = DriveTier(driver, self.format, max_tokens) if driver else None
        # K and V on the device, by request and number of the window's layer
        self.windows: dict[tuple[Hashable, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._policy_thread = PolicyThread()
        held = stores(tiers, self.device, CachedFiles(tiers.folder))
        if self.drives:
            held[CSD] = self.drives
        capacity = in_blocks(max_tokens * self.row_bytes)
        self.real = RealTransfers(held, lambda block: capacity, self._policy_thread.attends, bounce_of(self.device))
        machine = tiers.machine(cache_bytes, drives=driver is not None)
        self.runner = IterationRunner(machine, range(shape.layers), program, self.real, parts=(PART,))
        self.runner.memory["below"] = PAGE_CACHE if tiers.host == 0 and cache_bytes else HOST

    @contextmanager
    def iteration(self, new: Mapping[Hashable, int], homes: Homes) -> Iterator[None]:
        """A forward in which requests get so many tokens. homes: where each layer lies from then on, of all requests.

        Raises PolicyError where some tier cannot hold what it must; then what its requests have is of no use any more.
        """
        self.runner.memory["homes"] = homes
        for request, tokens in new.items():
            if (length := self.tokens(request) + tokens) > self.max_tokens:
                raise PolicyError(f"{length} tokens: there is room for {self.max_tokens}")
        self._policy_thread.start(lambda: self.runner.run(new, dict.fromkeys(new, self.row_bytes)))
        try:
            if self.drives and set(new.values()) == {1}:
                with self.drives.step():
                    yield
            else:
                yield
            self._policy_thread.finish()
        except BaseException:
            self.runner.abandon()
            self._policy_thread.abandon()
            raise

    def reach(self, layer: int, rows: int) -> Iterator[AttendCall]:
        """The model is at a layer's attention: which of so many rows are attended where, as they are ready."""
        while rows:
            attention = self._policy_thread.reach(layer)
            yield attention
            rows -= len(attention.rows)

    def stored(self, block: BlockKey) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a block on the device, each (tokens, kv_heads, channels), to be read and written."""
        tokens = self.runner.table[block].tokens
        flat = first_bytes(self.real.frame(block, DEVICE), tokens * self.row_bytes)
        return self.format.split(flat.view(self.format.value_dtype))

    def tokens(self, request: Hashable, layer: int = 0) -> int:
        """How many a request has; in a forward, how many it has of a layer that is attended."""
        return sum(self.runner.table[block].tokens for block in self.blocks(request, layer))

    def blocks(self, request: Hashable, layer: int) -> list[BlockKey]:
        """What a request has of a layer."""
        entries, found = self.runner.table.entries, list[BlockKey]()
        while (block := BlockKey(request, layer, PART, len(found))) in entries:
            found.append(block)
        return found

    def requests(self) -> set[Hashable]:
        """Those that have K and V."""
        return {block.request for block in self.runner.table.entries}

    def free(self, request: Hashable) -> None:
        """Forget a request."""
        self.real.settle()
        self.runner.free(request)
        self.real.forget(request)
        for key in [key for key in self.windows if key[0] == request]:
            del self.windows[key]

    def close(self) -> None:
        """Let what is under way end, and free everything."""
        for request in self.requests():
            self.free(request)
        self.real.close()
