"""TTFT of a request with a stored prefix, copy by copy: the shipped policies on simulated links."""

from __future__ import annotations

from dataclasses import dataclass

from kv_cache.block_table import BlockKey
from kv_cache.hardware import DEVICE, DIRECT, Machine, Route, SharedLink, Tier
from kv_cache.iteration import IterationRunner
from kv_cache.policies.preload import Preload
from kv_cache.policies.tutti import Tutti
from kv_cache.transfer.simulated import LayerTime, SimulatedTransfers
from vcsd_eval.papers.tutti.reading import GpuReading, Path


@dataclass(frozen=True, slots=True)
class ByEvents(GpuReading):
    """The same model on the same GPU; layers are computed and copied one by one."""

    def first_token_s(self, new: float, prefix: float, path: Path | None, here: float = 0) -> float:
        """As `Reading.first_token_s` says; the path carries reads and writes at the same rate.

        Raises:
            ValueError: Part of the prefix is on the device already, which has only the closed form.
        """
        compute_s = self.compute_s(new, prefix)
        if path is None or not prefix:
            return compute_s
        if here:
            raise ValueError(f"here = {here}: must be 0, prefixes are loaded as a whole")
        layers = self.model.layers
        row_bytes = self.model.shape.kv_bytes_per_token // layers
        machine = Machine.of(
            [Tier(DEVICE, attends=True), Tier(DIRECT)],
            [SharedLink("read", path.bytes_per_s), SharedLink("write", path.bytes_per_s)],
            {(DIRECT, DEVICE): Route("in", ("read",)), (DEVICE, DIRECT): Route("out", ("write",))},
        )
        transfers = SimulatedTransfers(machine, lambda call: LayerTime(1e9 * compute_s / layers))
        policy = Tutti() if path.layered else Preload()
        runner = IterationRunner(machine, range(layers), policy.layers, transfers, parts=("kv",))
        for layer in range(layers):
            runner.table.add(BlockKey(0, layer, "kv"), row_bytes, DIRECT, int(prefix))
        runner.run({0: int(new)}, {0: row_bytes})
        return transfers.now_ns / 1e9
