"""What a host's prefill and decode step cost: GPU, link, network, drives."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from csd_spec import DriveSpec
from csd_spec.arrays import F64
from csd_spec.network import Network
from eval.fleet.drive_model import FP16_BYTES, Coefficients, Rates
from eval.fleet.events import DRIVES, GPU, NETWORK, Costs, Requests
from eval.fleet.workload import Arrivals
from eval.papers.instinfer.systems import crossing_s
from eval.papers.profiles import Gpu, Model
from kv_cache.cost import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A host with one GPU and its drives, which are groups that each have all KV heads.

    Attributes:
        model, gpu, spec, fitted: The model, the host's GPU, one drive, and what was fitted to it.
        network: The host's port to its drives; None: they are on PCIe.
        drives: Of this host.
        slots: Sequences of a group.
    """

    model: Model
    gpu: Gpu
    spec: DriveSpec
    fitted: Coefficients
    network: Network | None
    drives: int
    slots: int

    @property
    def group(self) -> int:
        """Drives that share the KV heads of a sequence."""
        return min(self.drives, self.model.kv_heads)

    @property
    def groups(self) -> int:
        """Groups of the host; each sequence is on one. Drives that do not make up a group are idle."""
        return self.drives // self.group

    @property
    def cost(self) -> CostModel:
        """The model on the GPU."""
        return CostModel.of(self.model, self.gpu.accelerator)

    def costs(self) -> Costs:
        """Of a decode step, by the sequences of the host."""
        layers, fitted = self.model.shape.layers, self.fitted
        rates = Rates.of(self.spec, self.model.shape, -(-self.model.kv_heads // self.group))
        each = layers * fitted.transfer * np.array([rates.flash_s, rates.engine_s, rates.tail_s])
        rows = [self._outside_s(batch) for batch in range(self.groups * self.slots + 1)]
        return Costs(np.array(rows), np.array([layers * fitted.command_s, *each]), fitted.slowest(self.group))

    def _outside_s(self, batch: int) -> tuple[float, float, float]:
        """GPU, link and network of a step."""
        if not batch:
            return 0.0, 0.0, 0.0
        model, link, layers, cost = self.model, self.spec.link, self.model.shape.layers, self.cost
        rows = 2 * (model.q_heads + model.kv_heads)  # q, k and v go down, the output comes up
        on_drive = -(-FP16_BYTES * batch * rows * model.head_dim // (self.groups * self.group))
        link_s = layers * (link.transfer_ns(on_drive) + 2 * link.command_ns) / 1e9
        used = min(batch, self.groups) * self.group
        network_s = layers * crossing_s(model, self.network, batch, used, 1) if self.network else 0.0
        return cost.linear_s(batch) + cost.runtime_s(batch), link_s, network_s

    def requests(self, arrivals: Arrivals) -> Requests:
        """Requests with their prefill: the GPU's time, or that of writing K and V while it computes, if longer."""
        kv_bytes, cost = self.model.shape.kv_bytes_per_token, self.cost
        geometry = self.spec.geometry
        program_rate = geometry.lanes * geometry.page_bytes / (self.spec.timing.program_ns / 1e9)
        by_resource = {
            GPU: self._prefills_s(cost, arrivals),
            NETWORK: arrivals.input_tokens * (kv_bytes / self.network.bytes_per_s if self.network else 0.0),
            DRIVES: arrivals.input_tokens * (kv_bytes / (self.group * program_rate)),
        }
        seconds = np.array(list(by_resource.values()))
        longest = seconds.argmax(axis=0)
        bound = np.array(list(by_resource), np.int64)[longest]
        return Requests(arrivals.arrival_s, arrivals.input_tokens, arrivals.output_tokens, seconds.max(axis=0), bound)

    @staticmethod
    def _prefills_s(cost: CostModel, arrivals: Arrivals) -> F64:
        lengths, where = np.unique(arrivals.input_tokens, return_inverse=True)
        found: F64 = np.array([cost.prefill_s(int(tokens)) for tokens in lengths])[where]
        return found

    def check_room(self, arrivals: Arrivals) -> None:
        """Raise ValueError if full slots of the longest request do not fit the drives of a group."""
        longest = int((arrivals.input_tokens + arrivals.output_tokens).max())
        needed = self.slots * longest * self.model.shape.kv_bytes_per_token
        room = self.group * self.spec.geometry.capacity_bytes
        if needed > room:
            raise ValueError(
                f"batch = {self.slots}: {needed / 2**40:.1f} TiB of KV data, the drives of a group hold "
                f"{room / 2**40:.1f}: take a smaller --batch, or more --drives for each host"
            )

    def with_drives(self, drives: int) -> Machine:
        """The same host with other drives."""
        return replace(self, drives=drives)
