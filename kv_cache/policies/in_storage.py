"""InstInfer (arXiv 2409.04992): attention in the drives that hold the KV cache. Only q, k, v and outputs move."""

from __future__ import annotations

from kv_cache.hardware import CSD, DEVICE
from kv_cache.iteration import Iteration
from kv_cache.placement_runner import carry_out
from kv_cache.planner.problem import Offload
from kv_cache.scheduler import Policy, SchedulerOutput, SchedulerState


class InStorage(Policy):
    """All layers of all requests are attended in drives.

    Args:
        first_block: Whether the first tokens of each layer stay on the device, as a block of their own.
    """

    tiers: tuple[str, ...] = (CSD,)

    def __init__(self, first_block: bool = False) -> None:
        self.first_block, self.strided = first_block, not first_block
        self.tiers = (DEVICE, CSD) if first_block else (CSD,)

    def schedule(self, s: SchedulerState) -> SchedulerOutput | None:
        return s.prefill() or s.output(s.sequences, [Offload(s.cost.layers, in_drives=True)] * len(s.sequences))

    def layers(self, it: Iteration) -> None:
        """Execute the server's placement if there is one; otherwise all blocks are in drives."""
        if "homes" in it.memory:
            carry_out(it)
        else:
            in_storage(it)

    @property
    def has_layers(self) -> bool:
        return False


def in_storage(it: Iteration, method: str = "dense") -> None:
    """Program of an iteration with attention in the drives that hold the KV cache."""
    for layer in it.layers:
        it.attend(layer, at=CSD, method=method)
