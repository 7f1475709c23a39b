"""The paper's edge machine as tiers and routes: a page cache under a limit, files behind it, an SSD past the kernel."""

from __future__ import annotations

from dataclasses import dataclass

from eval.papers.claims import printed
from eval.papers.dual_blade.constants import ANONYMOUS, HINDERED, MEMORY_COPY
from eval.papers.machines import overlay
from eval.papers.profiles import Gpu, Host, Model, Ssd
from kv_cache import DEVICE, DIRECT, PAGE_CACHE, Link, Machine, Route, Tier
from kv_cache.cost import CostModel
from kv_cache.transfer.simulated import LayerTime

PRINTED = printed("dual-blade")
GIB = 2**30
EVICTED = "evicted"  # files whose pages are given up when they have been used
DMA, COPY, READ, WRITE, FAULTS = "gpu-in", "memory-copy", "ssd-read", "ssd-write", "faults"
QUEUED_BYTES = 32 * 128 * 1024  # Table I's requests under way, so that a rate is these over their mean latency
READ_BYTES, WRITTEN_BYTES = 527 * 8192 * 32, 512 * 8192 * 32  # K or V of a layer in Table IV: mean of decode, prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """What an SSD gives to K or V of a layer, bytes/s: past the kernel, and to threads that fault files in.

    profile: its data sheet.
    """

    profile: Ssd
    read: float
    write: float
    faulted: float

    def behind_ext4(self) -> Drive:
        """The same under requests past the page cache, but not past the file system, by as much as Table I has it."""
        d = PRINTED
        read, write = self.read * d["d3c"] / d["d3a"], self.write * d["d2c"] / d["d2a"]
        return Drive(profile=self.profile, read=read, write=write, faulted=self.faulted)


def drives() -> dict[str, Drive]:
    """SSD A at Table I's rates, SSD B at those that its rows of Table IV give; both fault as Table IV has it."""
    d = PRINTED
    return {
        "A": Drive(
            profile=Ssd.load("pm9d3a"),
            read=QUEUED_BYTES / (d["d3c"] * 1e-6),
            write=QUEUED_BYTES / (d["d2c"] * 1e-6),
            faulted=READ_BYTES / (d["d9c"] * 1e-3),
        ),
        "B": Drive(
            profile=Ssd.load("990pro"),
            read=READ_BYTES / (d["d12c"] * 1e-3),
            write=WRITTEN_BYTES / (d["d12a"] * 1e-3),
            faulted=READ_BYTES / (d["d11c"] * 1e-3),
        ),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model on the edge machine, and the paper's work: one batch, whose K and V of a layer are one block each."""

    model: Model
    gpu: Gpu
    host: Host
    batch: int = 32
    input: int = 512
    output: int = 32

    def __post_init__(self) -> None:
        if self.model.layers < 2:
            raise ValueError(f"model = {self.model.name}: of one layer there are no two groups")
        room = self.gpu.memory_gib * GIB - self.model.weight_bytes
        if room < 3 * self.layer_bytes(self.final_tokens):
            raise ValueError(
                f"gpu = {self.gpu.name}: {self.gpu.memory_gib:g} GiB do not hold the weights of {self.model.name}, "
                f"{self.model.weight_bytes / GIB:.1f} GiB, and three layers of K and V"
            )

    @property
    def row_bytes(self) -> int:
        """One token of K or V of a layer, of the whole batch."""
        return 2 * self.batch * self.model.kv_heads * self.model.head_dim

    @property
    def final_tokens(self) -> int:
        """Tokens that are stored in the end; the last one that is made is not."""
        return self.input + self.output - 1

    def layer_bytes(self, tokens: int) -> int:
        """K and V of a layer."""
        return 2 * tokens * self.row_bytes

    def cache_bytes(self, limit_gib: float) -> int:
        """What a limit leaves to the page cache, beside the runtime and a pinned buffer for each of two threads."""
        return max(0, int((limit_gib - ANONYMOUS.value) * GIB) - self.layer_bytes(self.final_tokens))

    def limit_gib(self, cache_bytes: int) -> float:
        """The limit that leaves so much."""
        return ANONYMOUS.value + (cache_bytes + self.layer_bytes(self.final_tokens)) / GIB

    @property
    def cost(self) -> CostModel:
        """The model on the GPU."""
        return CostModel.of(self.model, self.gpu.accelerator, overlay("dual-blade"))

    @property
    def prefill_gpu_s(self) -> float:
        """Prefill, as long as the GPU computes."""
        return self.model.layers * self.work(self.input, self.input).device_ns / 1e9

    def work(self, new: int, tokens: int) -> LayerTime:
        """A layer's work on the GPU for a batch whose sequences have so many tokens, `new` of them new."""
        if new == 1:
            step_s = self.cost.decode_s(self.batch, self.batch * tokens)
        else:
            step_s = self.cost.prefill_s(tokens, tokens - new, self.batch)
        return LayerTime(1e9 * step_s / self.model.layers)


def machine(setup: Setup, drive: Drive, cache_bytes: int | None, piece_bytes: int = 0) -> Machine:
    """Tiers and routes. cache_bytes: None is as much as wanted. piece_bytes: how copies are cut; 0: they are not.

    DMA to the GPU goes in turn, and reads that write the same memory are contention meanwhile; threads that fault files
    in wait for each other, and leave other reads the rest of the SSD's rate.
    """
    gpu_link, copied = setup.host.gpu_link_gb_per_s * 1e9, MEMORY_COPY.value * 1e9
    contention = {DMA: HINDERED.value}
    links = [
        Link(DMA, gpu_link, fifo=True),
        Link("gpu-out", gpu_link, fifo=True),
        Link(COPY, copied, contention=contention),
        Link("memory-copy-out", copied),
        Link(READ, drive.read, contention={**contention, FAULTS: 1 - drive.faulted / drive.read}),
        Link(WRITE, drive.write, start_ns=round(1000 * drive.profile.random_write_us)),
        Link(FAULTS, drive.faulted, fifo=True),
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
