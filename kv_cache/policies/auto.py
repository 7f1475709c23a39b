"""Selection of a policy by the size of the KV cache, with the reason."""

from __future__ import annotations

from kv_cache.hardware import DEVICE, HOST, PAGE_CACHE
from kv_cache.iteration import Iteration
from kv_cache.policies.flexgen import FlexGen
from kv_cache.policies.reactive import Reactive
from kv_cache.policies.split import Split
from kv_cache.scheduler import Policy

_MIB = 2**20


class Auto(Policy):
    """The highest tier that holds the whole KV cache; chosen again for a larger batch or a changed limit.

    Attributes:
        why: Reason of the choice.
    """

    def __init__(self) -> None:
        self._split = Split()
        self._chosen: Policy = self._split
        self._total = 0
        self._sizes: tuple[float, ...] = ()

    def layers(self, it: Iteration) -> None:
        final = max(it.final_tokens, *it.new.values())
        self._total = max(self._total, len(it.layers) * it.layer_bytes(final))
        sizes = self._total, *map(it.capacity, (DEVICE, HOST, PAGE_CACHE))
        if sizes != self._sizes:
            self._sizes = sizes
            self._chosen, where = self._choose(*sizes)
            self.why = f"the KV cache of {final:,} tokens, {self._total / _MIB:,.1f} MiB, {where}"
        self._chosen.layers(it)

    def _choose(self, total: float, device: float, host: float, page_cache: float) -> tuple[Policy, str]:
        """The policy for these sizes, bytes, and why."""
        if total <= device:
            return Reactive(), "fits on the device"
        if total <= host:
            return FlexGen(home=HOST), "fits in host memory, not on the device"
        if total <= page_cache:
            return FlexGen(), "fits in the page cache, not in host memory"
        return self._split, "exceeds each tier in memory: it is split between page cache and disk"
