"""State on which command handlers work."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from attention_engine import EngineClock, Memory, Methods, add_rows
from csd_firmware.logs import CommandStats
from csd_firmware.schedule import StepResources
from csd_spec import Attend, DriveSpec, FlashCounters, KvAppend, Status
from csd_spec.arrays import F16, F32
from ftl import Ftl, Nand, PagePlan, UncorrectableReadError, round_to_codec


@dataclass(frozen=True, slots=True)
class Quota:
    """A tenant's quota; `share` is its fraction of all resources, above 0 and at most 1."""

    tenant: str
    share: float


class DriveState:
    """FTL, engine resources, methods and statistics; and per-sequence state besides the KV data.

    Attributes:
        v_sums: Sum of V of each sequence, (layers, H, d); stored in flash with it.
        memory: State that methods keep between steps, by sequence and layer.
    """

    def __init__(self, spec: DriveSpec, nand: Nand | None, methods: Methods, threads: int = 1) -> None:
        self.spec, self.methods, self.threads = spec, dict(methods), threads
        self.ftl = Ftl(spec, nand)
        self.units = StepResources(self.ftl, EngineClock(spec.engine))
        self.history = CommandStats()
        self.tenant = 0  # label of the current command's tenant
        self.quotas: dict[int, Quota] = {}  # by label; no entry means unlimited
        for finding in self.ftl.findings:
            self.history.refuse("power-on", Status.UNRECOVERED_READ_ERROR, finding)
        self.ftl.counters.power_cycles += 1
        self.v_sums: dict[int, F32] = {}
        self.memory: dict[tuple[int, int], Memory] = {}
        for handle, seq in self.ftl.sequences.items():  # sequences restored from an existing Nand
            has_sums = seq.v_sums is not None or seq.layout.opaque
            self.open(handle)
            with suppress(UncorrectableReadError):  # the sequence is then marked as failed
                for layer in np.flatnonzero([] if has_sums or seq.failed else seq.lengths).tolist():
                    self.add_v(handle, layer, self.ftl.read_back(handle, layer)[1])

    def open(self, handle: int) -> None:
        """Create the state of a sequence."""
        seq = self.ftl.sequences[handle]
        assert handle not in self.v_sums, f"sequence {handle} is open"
        if seq.layout.opaque:
            self.v_sums[handle] = np.zeros((seq.layers, 0, 0), np.float32)
            return
        if seq.v_sums is None:
            seq.v_sums = np.zeros((seq.layers, seq.heads, seq.layout.head_dim), np.float32)
        self.v_sums[handle] = seq.v_sums

    def close(self, handle: int) -> None:
        """Delete the state of a sequence."""
        for layer in range(self.v_sums.pop(handle).shape[0]):
            self.memory.pop((handle, layer), None)

    def add_v(self, handle: int, layer: int, rows: F16) -> None:
        """Add rows (tokens, H, d) of V to a layer's sum, in token order; opaque layouts have no sum."""
        if not self.v_sums[handle].size:
            return
        layout = self.ftl.sequences[handle].layout
        assert rows.shape[1:] == self.v_sums[handle].shape[1:], f"sequence {handle}: rows of shape {rows.shape}"
        add_rows(self.v_sums[handle][layer], round_to_codec(layout, rows).view(np.uint16), layout.bf16)

    def sums(self, handles: Sequence[int], layer: int) -> F32:
        """Return a copy of the sums of V of a layer, (B * H, d)."""
        return np.concatenate([self.v_sums[handle][layer] for handle in handles])

    def set_sums(self, handles: Sequence[int], layer: int, sums: F32) -> None:
        """Set the sums of V of a layer, (B * H, d)."""
        heads = sums.shape[0] // len(handles)
        assert heads * len(handles) == sums.shape[0], f"{sums.shape[0]} sums of {len(handles)} sequences"
        for number, handle in enumerate(handles):
            self.v_sums[handle][layer] = sums[number * heads : (number + 1) * heads]


def rows_of_v(command: KvAppend | Attend) -> F16:
    """Rows (..., H, d) of V in a command; those of K if V is a part of K."""
    return command.v if command.v.shape[-1] else command.k


def flash_read(*plans: PagePlan, programmed: int = 0) -> FlashCounters:
    """Counters for reading the plans' pages, and programming `programmed` pages."""
    read = useful = fetched = 0
    for plan in plans:
        read += plan.ppns.size
        useful += plan.useful_bytes
        fetched += plan.fetched_bytes
    return FlashCounters(pages_read=read, pages_programmed=programmed, useful_bytes=useful, fetched_bytes=fetched)
