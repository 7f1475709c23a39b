"""What the verbs of a drive work on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from attention_engine import EngineClock, Memory, Methods, add_rows
from csd_firmware.logs import History
from csd_firmware.schedule import Units
from csd_spec import Attend, DriveSpec, FlashCounters, KvAppend, Status
from csd_spec.arrays import F16, F32
from ftl import Ftl, Nand, PagePlan, UncorrectableReadError, round_to_codec


@dataclass(frozen=True, slots=True)
class Quota:
    """A tenant's part of a drive. share: of everything that tenants use, above 0 to 1."""

    tenant: str
    share: float


class DriveState:
    """The FTL, the engine's clock and methods, the logs; and what is kept of sequences beside their K and V.

    v_sums: of each sequence, (layers, H, d), kept with it in flash. memory: of a sequence's layer, what methods keep
    between steps.
    """

    def __init__(self, spec: DriveSpec, nand: Nand | None, methods: Methods, threads: int = 1) -> None:
        self.spec, self.methods, self.threads = spec, dict(methods), threads
        self.ftl = Ftl(spec, nand)
        self.units = Units(self.ftl, EngineClock(spec.engine))
        self.history = History()
        self.tenant = 0  # whose command is carried out
        self.quotas: dict[int, Quota] = {}  # by label; tenants without one may use everything
        for finding in self.ftl.findings:
            self.history.refuse("power-on", Status.UNRECOVERED_READ_ERROR, finding)
        self.ftl.counters.power_cycles += 1
        self.v_sums: dict[int, F32] = {}
        self.memory: dict[tuple[int, int], Memory] = {}
        for handle, seq in self.ftl.sequences.items():  # what a Nand that was used before holds
            known = seq.v_sums is not None or seq.layout.opaque
            self.open(handle)
            with suppress(UncorrectableReadError):  # then it has failed
                for layer in np.flatnonzero([] if known or seq.failed else seq.lengths).tolist():
                    self.add_v(handle, layer, self.ftl.read_back(handle, layer)[1])

    def open(self, handle: int) -> None:
        """Begin to keep what belongs to a sequence."""
        seq = self.ftl.sequences[handle]
        if seq.layout.opaque:
            self.v_sums[handle] = np.zeros((seq.layers, 0, 0), np.float32)
            return
        if seq.v_sums is None:
            seq.v_sums = np.zeros((seq.layers, seq.heads, seq.layout.head_dim), np.float32)
        self.v_sums[handle] = seq.v_sums

    def close(self, handle: int) -> None:
        """Forget what belongs to a sequence."""
        for layer in range(self.v_sums.pop(handle).shape[0]):
            self.memory.pop((handle, layer), None)

    def add_v(self, handle: int, layer: int, rows: F16) -> None:
        """Add rows (tokens, H, d) of V to a layer's sum, in token order; of opaque ones there is none."""
        if not self.v_sums[handle].size:
            return
        layout = self.ftl.sequences[handle].layout
        add_rows(self.v_sums[handle][layer], round_to_codec(layout, rows).view(np.uint16), layout.bf16)

    def sums(self, handles: Sequence[int], layer: int) -> F32:
        """A copy of the sums (B * H, d) of V of a layer."""
        return np.concatenate([self.v_sums[handle][layer] for handle in handles])

    def set_sums(self, handles: Sequence[int], layer: int, sums: F32) -> None:
        """These are the sums (B * H, d) of V of a layer from now on."""
        heads = sums.shape[0] // len(handles)
        for number, handle in enumerate(handles):
            self.v_sums[handle][layer] = sums[number * heads : (number + 1) * heads]


def rows_of_v(command: KvAppend | Attend) -> F16:
    """Rows (..., H, d) of V that a command stores: those of K, where V is a part of that."""
    return command.v if command.v.shape[-1] else command.k


def flash_read(*plans: PagePlan, programmed: int = 0) -> FlashCounters:
    """What reading the plans' pages, and programming some, counts."""
    read = useful = fetched = 0
    for plan in plans:
        read += plan.ppns.size
        useful += plan.useful_bytes
        fetched += plan.fetched_bytes
    return FlashCounters(pages_read=read, pages_programmed=programmed, useful_bytes=useful, fetched_bytes=fetched)
