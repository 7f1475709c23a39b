"""Time that a host's prefill and decode step take: GPU, link, network, drives."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from csd_spec import DriveSpec
from csd_spec.arrays import F64
from csd_spec.network import Network
from kv_cache.cost import CostModel
from vcsd_eval.fleet.drive_model import FP16_BYTES, Coefficients, DriveRates
from vcsd_eval.fleet.events import COPIED, LOCAL, NO_PREFIXES, Costs, DriveStep
from vcsd_eval.papers.instinfer.systems import crossing_s, output_bytes
from vcsd_eval.papers.profiles import Gpu, Model

PREFILL_GRID = 32  # tokens between the rows of prefill tables
MERGE_BYTES_PER_S = 25e9  # assumed: partial outputs are merged at the rate of one channel of DDR4-3200
PrefixReuse = Literal["none", "local", "copied"]
PREFIX_REUSE = {"none": NO_PREFIXES, "local": LOCAL, "copied": COPIED}


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a host uses its drives.

    Attributes:
        micro_batches: Parts of a batch; of two, one computes on the GPU while the other attends in the drives.
        late_kv: Keys and values of a new token go to the drives once per step, for all layers in one message, instead
            of with the queries of each layer; the GPU attends to this token and merges.
        token_shards: Drives that share the tokens of a KV head.
        two_level: Partial outputs of a head's token shards are merged in the enclosure of the drives, not on the host.
        prefixes: Reuse of stored prompts: `none`, `local`, or `copied` to the group of another host.
    """

    micro_batches: int = 1
    late_kv: bool = False
    token_shards: int = 1
    two_level: bool = False
    prefixes: PrefixReuse = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetHost:
    """A host with one GPU and its drives, which are groups that each have all KV heads.

    Attributes:
        model, gpu, spec, fitted: The model, the host's GPU, one drive, and its fitted coefficients.
        network: The host's port to its drives; None: they are on PCIe.
        drives: Number of drives of this host.
        slots: Sequences per group.
        scheme: How the host uses its drives.
    """

    model: Model
    gpu: Gpu
    spec: DriveSpec
    fitted: Coefficients
    network: Network | None
    drives: int
    slots: int
    scheme: Scheme = field(default_factory=Scheme)

    @property
    def shards(self) -> int:
        """Drives that share the tokens of a KV head."""
        return max(1, min(self.scheme.token_shards, self.drives // self.model.kv_heads))

    @property
    def group(self) -> int:
        """Drives that share a sequence."""
        return min(self.drives, self.model.kv_heads * self.shards)

    @property
    def groups(self) -> int:
        """Groups of the host; each sequence is on one. Drives that do not make up a group are idle."""
        return self.drives // self.group

    @property
    def cost(self) -> CostModel:
        """The model on the GPU."""
        return CostModel.of(self.model, self.gpu.accelerator)

    def costs(self, longest: int) -> Costs:
        """Seconds of the host's work. longest: tokens of the longest prompt."""
        layers, fitted = self.model.shape.layers, self.fitted
        rates = DriveRates.of(self.spec, self.model.shape, -(-self.model.kv_heads * self.shards // self.group))
        shared = (
            layers * fitted.transfer * each_s / self.shards for each_s in (rates.flash_s, rates.engine_s, rates.tail_s)
        )
        rows = [self._outside_s(batch) for batch in range(self.groups * self.slots + 1)]
        new_s, seen_s = self._prefill_tables(longest)
        return Costs(
            by_batch=np.array(rows),
            drive=DriveStep(layers * fitted.command_s, *shared),
            slowest=fitted.slowest(self.group),
            micro_batches=self.scheme.micro_batches,
            layers=layers,
            prefill_grid=PREFILL_GRID,
            new_s=new_s,
            seen_s=seen_s,
            write_s=self.write_s,
            read_s=self.read_s,
            copy_s=self.write_s,
            prefixes=PREFIX_REUSE[self.scheme.prefixes],
        )

    @property
    def write_s(self) -> F64:
        """Seconds per token that a group's drives store: network and drives, (2,)."""
        geometry = self.spec.geometry
        return self._moved_s(self.group * geometry.lanes * geometry.page_bytes / (self.spec.timing.program_ns / 1e9))

    @property
    def read_s(self) -> F64:
        """Seconds per token that a group's drives send to the GPU: network and drives, (2,)."""
        return self._moved_s(self.group * self.spec.flash_bytes_per_s)

    def _moved_s(self, drives_bytes_per_s: float) -> F64:
        """Seconds per token of KV data that moves: network and drives, (2,)."""
        kv_bytes = self.model.shape.kv_bytes_per_token
        return np.array([kv_bytes / self.network.bytes_per_s if self.network else 0.0, kv_bytes / drives_bytes_per_s])

    def _outside_s(self, batch: int) -> tuple[float, float, float]:
        """GPU, link and network of a step."""
        if not batch:
            return 0.0, 0.0, 0.0
        layers, cost, parts = self.model.shape.layers, self.cost, self._parts(batch)
        gpu_s = parts * cost.linear_s(batch / parts) + cost.runtime_s(batch)
        return gpu_s + layers * self._merge_s(batch), layers * self._link_s(batch), layers * self._crossing_s(batch)

    def _parts(self, batch: int) -> int:
        """Parts of a batch: a lone sequence is not divided."""
        return min(self.scheme.micro_batches, batch)

    def transfer_s(self, batch: int) -> float:
        """Seconds per layer of link, network and merging."""
        return self._link_s(batch) + self._crossing_s(batch) + self._merge_s(batch)

    def _link_s(self, batch: int) -> float:
        """Seconds per layer that commands and their data take between a drive and its port."""
        model, link = self.model, self.spec.link
        late_rows = 0 if self.scheme.late_kv else 2 * model.kv_heads
        rows = 2 * model.q_heads * self.shards + late_rows  # q, k and v go down, the output comes up
        on_drive = -(-FP16_BYTES * batch * rows * model.head_dim // (self.groups * self.group))
        return (link.transfer_ns(on_drive) + 2 * self._parts(batch) * link.command_ns) / 1e9

    def _merge_s(self, batch: int) -> float:
        """Seconds per layer to merge the outputs of token shards, on the host or in the enclosures."""
        model = self.model
        return (
            0.0 if self.shards == 1 else self.shards * batch * model.q_heads * output_bytes(model) / MERGE_BYTES_PER_S
        )

    def _crossing_s(self, batch: int) -> float:
        """Seconds per layer that queries, keys, values and outputs take over the port that all drives share."""
        if self.network is None:
            return 0.0
        scheme, drives = self.scheme, min(batch, self.groups) * self.group
        addressed, copies = (drives // self.shards, 1) if scheme.two_level else (drives, self.shards)
        kv_rows = 0 if scheme.late_kv else None
        return crossing_s(self.model, self.network, batch, addressed, self._parts(batch), copies, kv_rows)

    def _prefill_tables(self, longest: int) -> tuple[F64, F64]:
        """GPU time of new tokens, and of attention to all tokens of a prompt, by tokens in steps of PREFILL_GRID."""
        tokens, cost = np.arange(0, longest + 2 * PREFILL_GRID, PREFILL_GRID), self.cost
        all_s = np.array([cost.prefill_s(int(token)) for token in tokens])
        seen_s = np.array([cost.prefill_attention_s(int(token)) for token in tokens])
        return all_s - seen_s, seen_s

    def check_room(self, longest: int) -> None:
        """Raise ValueError if full slots of requests with `longest` tokens do not fit the drives of a group."""
        needed = self.slots * longest * self.model.shape.kv_bytes_per_token
        room = self.group * self.spec.geometry.capacity_bytes
        if needed > room:
            raise ValueError(
                f"batch = {self.slots}: {needed / 2**40:.1f} TiB of KV data, the drives of a group hold "
                f"{room / 2**40:.1f}: take a smaller --batch, or more --drives for each host"
            )

    def with_drives(self, drives: int) -> FleetHost:
        """The same host with other drives."""
        return replace(self, drives=drives)
