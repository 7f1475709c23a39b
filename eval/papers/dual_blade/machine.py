"""The paper's edge machine as tiers and routes: page cache with a limit, files backed by it, SSD without the kernel."""

from __future__ import annotations

from dataclasses import dataclass

from kv_cache import DEVICE, DIRECT, PAGE_CACHE, Machine, Route, SharedLink, Tier
from kv_cache.cost import CostModel
from kv_cache.transfer.simulated import LayerTime
from vcsd_eval.papers.claims import printed
from vcsd_eval.papers.dual_blade.constants import ANONYMOUS, HINDERED, MEMORY_COPY
from vcsd_eval.papers.machines import overlay
from vcsd_eval.papers.profiles import Gpu, Host, Model, Ssd

PRINTED = printed("dual-blade")
GIB = 2**30
EVICTED = "evicted"  # files whose pages are dropped after use
DMA, COPY, READ, WRITE, FAULTS = "gpu-in", "memory-copy", "ssd-read", "ssd-write", "faults"
QUEUED_BYTES = 32 * 128 * 1024  # Table I's requests in flight: a rate is this over their mean latency
READ_BYTES, WRITTEN_BYTES = 527 * 8192 * 32, 512 * 8192 * 32  # K or V of a layer in Table IV: mean of decode, prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdRates:
    """Rates of an SSD for K or V of a layer, bytes/s: kernel bypass, and threads that fault files in.

    profile: its data sheet.
    """

    profile: Ssd
    read: float
    write: float
    faulted: float

    def behind_ext4(self) -> SsdRates:
        """Same drive with direct I/O through the file system, scaled as in Table I."""
        d = PRINTED
        read, write = self.read * d["d3c"] / d["d3a"], self.write * d["d2c"] / d["d2a"]
        return SsdRates(profile=self.profile, read=read, write=write, faulted=self.faulted)


def drives() -> dict[str, SsdRates]:
    """SSD A at Table I's rates, SSD B at the rates of its rows of Table IV; both fault at Table IV's rates."""
    d = PRINTED
    return {
        "A": SsdRates(
            profile=Ssd.load("pm9d3a"),
            read=QUEUED_BYTES / (d["d3c"] * 1e-6),
            write=QUEUED_BYTES / (d["d2c"] * 1e-6),
            faulted=READ_BYTES / (d["d9c"] * 1e-3),
        ),
        "B": SsdRates(
            profile=Ssd.load("990pro"),
            read=READ_BYTES / (d["d12c"] * 1e-3),
            write=WRITTEN_BYTES / (d["d12a"] * 1e-3),
            faulted=READ_BYTES / (d["d11c"] * 1e-3),
        ),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSetup:
    """A model on the edge machine, and the paper's workload: one batch whose keys and values of a layer are one block
    each.
    """

    model: Model
    gpu: Gpu
    host: Host
    batch: int = 32
    input: int = 512
    output: int = 32

    def __post_init__(self) -> None:
        if self.model.layers < 2:
            raise ValueError(f"model = {self.model.name}: has one layer, must have at least 2 for two groups")
        room = self.gpu.memory_gib * GIB - self.model.weight_bytes
        if room < 3 * self.layer_bytes(self.final_tokens):
            raise ValueError(
                f"gpu = {self.gpu.name}: {self.gpu.memory_gib:g} GiB do not hold the weights of {self.model.name}, "
                f"{self.model.weight_bytes / GIB:.1f} GiB, and three layers of KV data: choose a larger --gpu"
            )

    @property
    def row_bytes(self) -> int:
        """Size of one token of K or V of a layer, of the whole batch, bytes."""
        return 2 * self.batch * self.model.kv_heads * self.model.head_dim

    @property
    def final_tokens(self) -> int:
        """Tokens that are stored at the end; the last generated one is not stored."""
        return self.input + self.output - 1

    def layer_bytes(self, tokens: int) -> int:
        """Size of the KV data of a layer, bytes."""
        return 2 * tokens * self.row_bytes

    def cache_bytes(self, limit_gib: float) -> int:
        """Page cache left by a limit, after the runtime and one pinned buffer for each of two threads, bytes."""
        return max(0, int((limit_gib - ANONYMOUS.value) * GIB) - self.layer_bytes(self.final_tokens))

    def limit_gib(self, cache_bytes: int) -> float:
        """Limit that leaves this page cache, GiB."""
        return ANONYMOUS.value + (cache_bytes + self.layer_bytes(self.final_tokens)) / GIB

    @property
    def cost(self) -> CostModel:
        """The model on the GPU."""
        return CostModel.of(self.model, self.gpu.accelerator, overlay("dual-blade"))

    @property
    def prefill_gpu_s(self) -> float:
        """GPU time of prefill, seconds."""
        return self.model.layers * self.work(self.input, self.input).device_ns / 1e9

    def work(self, new: int, tokens: int) -> LayerTime:
        """GPU time of a layer for a batch with `tokens` tokens per sequence, `new` of them new."""
        if new == 1:
            step_s = self.cost.decode_s(self.batch, self.batch * tokens)
        else:
            step_s = self.cost.prefill_s(tokens, tokens - new, self.batch)
        return LayerTime(1e9 * step_s / self.model.layers)


def machine(setup: EdgeSetup, drive: SsdRates, cache_bytes: int | None, piece_bytes: int = 0) -> Machine:
    """Tiers and routes.

    DMA to the GPU is serialized, and reads into the same memory slow down in the meantime; threads that fault files in
    are serialized too, and leave the rest of the SSD's rate to other reads.

    Args:
        setup: Model and workload.
        drive: Rates of the SSD.
        cache_bytes: Size of the page cache; None is unlimited.
        piece_bytes: Size of the pieces into which copies are cut; 0 disables cutting.
    """
    gpu_link, copied = setup.host.gpu_link_gb_per_s * 1e9, MEMORY_COPY.value * 1e9
    contention = {DMA: HINDERED.value}
    links = [
        SharedLink(DMA, gpu_link, fifo=True),
        SharedLink("gpu-out", gpu_link, fifo=True),
        SharedLink(COPY, copied, contention=contention),
        SharedLink("memory-copy-out", copied),
        SharedLink(READ, drive.read, contention={**contention, FAULTS: 1 - drive.faulted / drive.read}),
        SharedLink(WRITE, drive.write, start_ns=round(1000 * drive.profile.random_write_us)),
        SharedLink(FAULTS, drive.faulted, fifo=True),
    ]
    to_file = Route("to-file", ("gpu-out", "memory-copy-out"), piece_bytes, background=(WRITE,))
    lba = drive.profile.lba_bytes
    routes = {
        (PAGE_CACHE, DEVICE): Route("page-cache", (COPY, DMA), piece_bytes, miss_links=(FAULTS, DMA)),
        (EVICTED, DEVICE): Route("evicted", (FAULTS, DMA), piece_bytes),
        (DIRECT, DEVICE): Route("direct", (READ, DMA), piece_bytes, lba),
        (DEVICE, PAGE_CACHE): to_file,
        (DEVICE, EVICTED): to_file,
        (DEVICE, DIRECT): Route("to-direct", ("gpu-out", WRITE), 0, lba),
    }
    tiers = [
        Tier(DEVICE, int(setup.gpu.memory_gib * GIB - setup.model.weight_bytes), attends=True),
        Tier(PAGE_CACHE, cache_bytes=cache_bytes),
        Tier(EVICTED),
        Tier(DIRECT),
    ]
    return Machine.of(tiers, links, routes)
