"""K and V of requests that decode side by side, each of its own length, each layer of each where it is to lie."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager

import torch

from csd_spec import ModelShape
from host_driver.drive_rows import DriveRows
from host_driver.driver import Driver
from host_driver.tiers import bounce_of, first_bytes, in_blocks, stores
from residency.executor import Attention
from residency.machine import CSD, DEVICE, HOST, PAGE_CACHE
from residency.policies.placed import Homes, placed
from residency.real.conductor import Conductor
from residency.real.executor import Real
from residency.real.frames import CachedFiles
from residency.table import Extent, Refused
from residency.tiers import Tiers
from residency.turn import Residency

PART = "kv"  # K and V of a token follow each other: they move together


class RowKv:
    """A table and a policy for all requests, and a turn for each forward. Used by one thread.

    With drives K and V are FP16 at every place, and attention on the device rounds as drives do: so it matters next to
    nothing where a row lies. Without them they have the model's dtype. What layers of windows see is kept on the
    device as the model has it, and is no part of the tiers.
    """

    def __init__(
        self,
        tiers: Tiers,
        shape: ModelShape,
        like: torch.Tensor,
        max_tokens: int,
        driver: Driver | None = None,
        cache_bytes: int = 0,
    ) -> None:
        """like: a parameter of the model, for its device and its dtype. max_tokens: of a request."""
        self.shape, self.max_tokens, self.device = shape, max_tokens, like.device
        self.dtype = torch.float16 if driver else like.dtype
        self.row_bytes = 2 * shape.kv_heads * shape.head_dim * self.dtype.itemsize
        self.drives = DriveRows(driver, max_tokens) if driver else None
        self.windows: dict[tuple[Hashable, int], torch.Tensor] = {}  # on the device, by request and the model's layer
        self._conductor = Conductor()
        held = stores(tiers, self.device, CachedFiles(tiers.folder))
        if self.drives:
            held[CSD] = self.drives
        capacity = in_blocks(max_tokens * self.row_bytes)
        self.real = Real(held, lambda extent: capacity, self._conductor.attends, bounce_of(self.device))
        machine = tiers.machine(cache_bytes, drives=driver is not None)
        self.residency = Residency(machine, range(shape.layers), placed, self.real, parts=(PART,))
        self.residency.memory["below"] = PAGE_CACHE if tiers.host == 0 and cache_bytes else HOST

    @contextmanager
    def turn(self, new: Mapping[Hashable, int], homes: Homes) -> Iterator[None]:
        """A forward in which requests get so many tokens. homes: where each layer lies from then on, of all requests.

        Raises Refused where some tier cannot hold what it must; then what its requests have is of no use any more.
        """
        self.residency.memory["homes"] = homes
        for request, tokens in new.items():
            if (length := self.tokens(request) + tokens) > self.max_tokens:
                raise Refused(f"{length} tokens: there is room for {self.max_tokens}")
        self._conductor.start(lambda: self.residency.turn(new, dict.fromkeys(new, self.row_bytes)))
        try:
            if self.drives and set(new.values()) == {1}:
                with self.drives.step():
                    yield
            else:
                yield
            self._conductor.finish()
        except BaseException:
            self.residency.abandon()
            self._conductor.abandon()
            raise

    def reach(self, layer: int, rows: int) -> Iterator[Attention]:
        """The model is at a layer's attention: which of so many rows are attended where, as they are ready."""
        while rows:
            attention = self._conductor.reach(layer)
            yield attention
            rows -= len(attention.rows)

    def stored(self, extent: Extent) -> torch.Tensor:
        """K and V of an extent on the device, (tokens, 2, H, d), to be read and written."""
        tokens = self.residency.table[extent].tokens
        flat = first_bytes(self.real.frame(extent, DEVICE), tokens * self.row_bytes)
        return flat.view(self.dtype).view(tokens, 2, self.shape.kv_heads, self.shape.head_dim)

    def tokens(self, request: Hashable, layer: int = 0) -> int:
        """How many a request has; in a forward, how many it has of a layer that is attended."""
        return sum(self.residency.table[extent].tokens for extent in self.blocks(request, layer))

    def blocks(self, request: Hashable, layer: int) -> list[Extent]:
        """What a request has of a layer."""
        entries, found = self.residency.table.entries, list[Extent]()
        while (extent := Extent(request, layer, PART, len(found))) in entries:
            found.append(extent)
        return found

    def requests(self) -> set[Hashable]:
        """Those that have K and V."""
        return {extent.request for extent in self.residency.table.entries}

    def free(self, request: Hashable) -> None:
        """Forget a request."""
        self.real.settle()
        self.residency.free(request)
        self.real.forget(request)
        for key in [key for key in self.windows if key[0] == request]:
            del self.windows[key]

    def close(self) -> None:
        """Let what is under way end, and free everything."""
        for request in self.requests():
            self.free(request)
        self.real.close()
