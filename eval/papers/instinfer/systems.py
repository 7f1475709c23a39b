"""The paper's five systems and two of this project, built from shared parts: GPU roofline, link, page cache, drive.

Seconds of a decode step have three parts: access to KV data, the drive's engine, and the rest (the GPU's roofline, the
link, and the runtime's work per sequence and layer).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from csd_link.network import COMMAND_BYTES, COMPLETION_BYTES
from csd_spec import NAMED, CompressionBudget, DriveSpec, SparFParams
from csd_spec.network import Network
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from csd_spec.sparf import BudgetConvention
from csd_spec.units import ENGINE_UNITS
from kv_cache import CSD, HOST, PAGE_CACHE
from kv_cache.cost import CostModel
from kv_cache.policies.flexgen import FlexGen
from kv_cache.transfer.simulated import LayerTime
from vcsd_eval.papers.instinfer import steps
from vcsd_eval.papers.instinfer.constants import CACHE, COPIES, PAGES, RUNTIME
from vcsd_eval.papers.machines import overlay
from vcsd_eval.papers.options import SAMPLED_LAYERS
from vcsd_eval.papers.profiles import Gpu, Host, Model, Ssd

GIB = 2**30
LENGTHS = 8  # simulated decode steps
SUMS_BYTES = 8  # maximum and sum of a query head's logits
SWAP_CLUSTER = 8 * 4096  # bytes that Linux swaps in at once (vm.page-cluster = 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What `vcsd_eval.papers.instinfer.constants` gives, so that it can be varied."""

    sequence_layer_s: float = RUNTIME.value * 1e-6
    token_page_share: float = PAGES.value
    cached_path: float = CACHE.value * 1e9
    host_link_share: float = COPIES.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model on hardware, and its work: `input` tokens of prompt and `output` new ones for each sequence.

    network: link between the host and drives that attend; None for local drives.
    sampled_layers: how many layers are simulated, and stand for all; None for all, and all sequences.
    """

    model: Model
    gpu: Gpu
    host: Host
    ssd: Ssd
    drive: DriveSpec = INSTCSD_ZYNQ7045_8CH
    network: Network | None = None
    input: int = 1024
    output: int = 1024
    compression: float = 8
    constants: Constants = Constants()
    sampled_layers: int | None = SAMPLED_LAYERS

    def __post_init__(self) -> None:
        if self.model.weight_bytes > self.gpu.memory_gib * GIB:
            raise ValueError(
                f"gpu = {self.gpu.name}: {self.gpu.memory_gib:g} GiB do not hold the weights of {self.model.name}, "
                f"{self.model.weight_bytes / GIB:.1f} GiB"
            )
        if self.input < 1 or self.output < 2:
            raise ValueError(f"input = {self.input}, output = {self.output}: must be at least 1 and 2 tokens")
        if self.sampled_layers is not None and self.sampled_layers < 1:
            raise ValueError(f"sampled_layers = {self.sampled_layers}: must be at least 1")

    @property
    def simulated_layers(self) -> int:
        """How many layers are simulated."""
        layers = self.model.shape.layers
        return min(self.sampled_layers or layers, layers)

    def kv_bytes(self, batch: int, tokens: float) -> float:
        """KV data of a batch in the layers with full attention, bytes."""
        return batch * tokens * self.model.shape.kv_bytes_per_token

    def stored(self, home: str, batch: int, share: float = 1.0, weights: int = 0) -> steps.TierContents:
        """KV data of a batch, or a fraction of it, at a tier, at the mean length over decode steps."""
        row = self.kv_bytes(batch, 1) * share / (2 * self.model.shape.layers)
        return steps.TierContents(
            home=home, tokens=float(self.steps.mean()), rows={"batch": round(row)}, weights=weights
        )

    @property
    def cost(self) -> CostModel:
        """The model on the GPU."""
        cost = replace(overlay("instinfer"), sequence_layer_s=self.constants.sequence_layer_s)
        return CostModel.of(self.model, self.gpu.accelerator, cost)

    def gpu_s(self, batch: float) -> float:
        """One decode step of everything but attention to all tokens, at the middle step."""
        return self.cost.linear_s(batch, float(self.steps.mean()))

    def attention_s(self, batch: int) -> float:
        """Seconds of full attention in the middle decode step, with the KV data in GPU memory."""
        return batch * float(self.steps.mean()) * self.cost.token_s

    def prefill_gpu_s(self, batch: int) -> float:
        """Prefill of a batch on the GPU."""
        return self.cost.prefill_s(self.input, batch=batch)

    def runtime_s(self, batch: int) -> float:
        """Runtime overhead of a step, for each sequence and layer, seconds."""
        return self.cost.runtime_s(batch)

    @property
    def steps(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Tokens stored at each decode step."""
        return np.arange(self.input, self.input + self.output)

    @property
    def points(self) -> list[int]:
        """Simulated decode steps, ascending.

        One random step from each of LENGTHS equal parts of decode: equal distances would alias with a layout's groups.
        """
        draws = np.random.default_rng(0).random(LENGTHS)
        return sorted({int(length) for length in self.input + (np.arange(LENGTHS) + draws) * self.output / LENGTHS})


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of a decode step. runtime_s, link_s and network_s are a part of other_s, and so is the GPU's time."""

    kv_s: float
    engine_s: float
    other_s: float
    hidden_s: float = 0  # overlapped part of these
    runtime_s: float = 0
    link_s: float = 0
    network_s: float = 0

    @property
    def parts_s(self) -> float:
        """The three parts one after the other."""
        return self.kv_s + self.engine_s + self.other_s

    @property
    def total_s(self) -> float:
        return self.parts_s - self.hidden_s

    @property
    def largest(self) -> str:
        """The resource that takes most of the step."""
        parts = {"runtime": self.runtime_s, "link": self.link_s, "network": self.network_s}
        parts |= {"drives": self.kv_s + self.engine_s, "gpu": self.other_s - sum(parts.values())}
        return max(parts, key=parts.__getitem__)

    @property
    def kv_share(self) -> float:
        """KV access as a fraction of the sum of the parts."""
        return self.kv_s / self.parts_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A system at a batch size: the mean decode step, or the reason why it cannot run."""

    system: str
    batch: int
    drives: int
    reason: str = ""
    prefill_s: float = 0
    step: Breakdown = Breakdown(0, 0, 0)
    tokens_per_s: float = 0
    units_s: dict[str, float] | None = None  # of the drive, in the mean step
    realtime_factor: float | None = None  # device seconds over wall seconds of the simulated steps
    simulated_sequences: int | None = None  # on a drive


def finish(
    setup: Setup, system: str, batch: int, drives: int, prefill_s: float, step: Breakdown, **more: Any
) -> Result:
    """End-to-end throughput: every sequence's output tokens over prefill and all decode steps."""
    total_s = prefill_s + setup.output * step.total_s
    rate = batch * setup.output / total_s
    return Result(system=system, batch=batch, drives=drives, prefill_s=prefill_s, step=step, tokens_per_s=rate, **more)


def deepspeed(setup: Setup, batch: int, drives: int) -> Result:
    """KV data in host memory, streamed together with the weights (ZeRO-Inference).

    Data beyond host memory is swapped cyclically, one cluster of pages at a time: each page-in evicts the same amount.
    Weights are in host memory even if the GPU could hold them (section VI-A: ZeRO-Inference is enabled), so OPT-30B
    swaps from batch 16 on. `offloaded` is the system whose weights are on the GPU.
    """
    c, model = setup.constants, setup.model
    buffers = 2 * model.layers  # key and value buffers of each layer with full attention
    held = model.weight_bytes + buffers * pinned_bytes(setup.kv_bytes(batch, setup.input + setup.output) / buffers)
    rate = setup.host.gpu_link_gb_per_s * 1e9 * c.host_link_share
    if held > setup.host.dram_gib * GIB:
        ssd = setup.ssd
        in_s = ssd.random_read_us * 1e-6 + SWAP_CLUSTER / (ssd.read_gb_per_s * 1e9)
        out_s = ssd.random_write_us * 1e-6 + SWAP_CLUSTER / (ssd.write_gb_per_s * 1e9)
        rate = SWAP_CLUSTER / (in_s + out_s)
    gpu_s, layers = setup.gpu_s(batch), model.shape.layers
    stored = setup.stored(HOST, batch, weights=round(model.weight_bytes / layers))
    step_s = steps.step_s(steps.host_memory(rate), steps.streamed, layers, stored, LayerTime(1e9 * gpu_s / layers))
    step = Breakdown(step_s - gpu_s, 0, gpu_s)
    prefill_s = max(setup.prefill_gpu_s(batch), setup.kv_bytes(batch, setup.input) / rate)
    return finish(setup, "DeepSpeed", batch, drives, prefill_s, step)


def pinned_bytes(nbytes: float) -> int:
    """Host memory that PyTorch pins for a buffer: the next power of two (its issues 95823 and 150517)."""
    return 1 << (math.ceil(nbytes) - 1).bit_length()


def flexgen(setup: Setup, batch: int, drives: int, sparse: bool = False) -> Result:
    """KV data in files on SSDs, through the page cache; a second SSD gains nothing, since the host path is the limit.

    Cyclic reads that do not fit an LRU cache never hit. Sparse: SparQ, with K stored twice and 1/c of the bytes read.
    """
    name, c, gpu = "FlexGen-SparQ" if sparse else "FlexGen", setup.constants, setup.gpu
    prefill_s = setup.prefill_gpu_s(batch)
    drain = setup.ssd.write_gb_per_s * 1e9 * c.host_link_share
    backlog = setup.kv_bytes(batch, setup.input) - drain * prefill_s
    if backlog + setup.model.weight_bytes > gpu.memory_gib * GIB:
        reason = f"the prompt's K and V that wait for the SSD, {backlog / GIB:.0f} GiB, exceed the GPU's memory"
        return Result(system=name, batch=batch, drives=drives, reason=reason)
    full = setup.kv_bytes(batch, float(setup.steps.mean()))
    stored = full * (1.5 if sparse else 1)
    read = stored / 1.5 / setup.compression if sparse else stored
    cache = max(0.0, setup.host.dram_gib * GIB - setup.model.weight_bytes)
    other_s = setup.gpu_s(batch) + read / (gpu.memory_gb_per_s * 1e9) + setup.runtime_s(batch)
    layers = setup.model.shape.layers
    work = LayerTime(1e9 * other_s / layers)
    file_path = 1 / (1 / c.cached_path + 1e-9 / setup.ssd.read_gb_per_s)  # the SSD's read, then the same copies
    machine = steps.files(c.cached_path, file_path, int(cache * read / stored))  # the read part of the cyclic data
    policy = FlexGen(ahead=0).layers
    total_s = steps.step_s(machine, policy, layers, setup.stored(PAGE_CACHE, batch, read / full), work)
    kv_s = total_s - other_s
    written_s = setup.kv_bytes(batch, setup.input) / drain
    return finish(setup, name, batch, drives, max(prefill_s, written_s), Breakdown(kv_s, 0, other_s))


def resident(setup: Setup, batch: int, drives: int) -> Result:
    """KV cache of the whole batch in GPU memory, by its data sheet."""
    if batch > room_of(setup):
        held = f"{setup.model.weight_bytes / GIB:.0f} GiB of weights and K and V of {room_of(setup)} such sequences"
        reason = f"{setup.gpu.name} holds {held}"
        return Result(system="GPU", batch=batch, drives=drives, reason=reason)
    step = Breakdown(setup.attention_s(batch), 0, setup.gpu_s(batch))
    return finish(setup, "GPU", batch, drives, setup.prefill_gpu_s(batch), step)


def paged(setup: Setup, batch: int, drives: int) -> Result:
    """vLLM: a batch of the sequences that fit in GPU memory, the others afterwards."""
    name, room = "vLLM", min(batch, room_of(setup))
    if not room:
        reason = f"K and V of a sequence do not fit beside the weights of {setup.model.name} on {setup.gpu.name}"
        return Result(system=name, batch=batch, drives=drives, reason=reason)
    full, rest = divmod(batch, room)
    runs = [(full, resident(setup, room, drives))] + ([(1, resident(setup, rest, drives))] if rest else [])
    prefill_s = sum(times * run.prefill_s for times, run in runs)
    parts = [sum(times * getattr(run.step, part) for times, run in runs) for part in ("kv_s", "engine_s", "other_s")]
    return finish(setup, name, batch, drives, prefill_s, Breakdown(*parts))


def room_of(setup: Setup) -> int:
    """Number of sequences whose KV cache fits in GPU memory next to the weights."""
    tokens = setup.input + setup.output
    left = setup.gpu.memory_gib * GIB - setup.model.weight_bytes
    return int(left // (setup.kv_bytes(1, tokens) + setup.model.window_bytes(tokens)))


def offloaded(setup: Setup, batch: int, drives: int) -> Result:
    """KV data in host memory, by the link's data sheet; the next layer is loaded while one is computed."""
    name, held = "Host", setup.kv_bytes(batch, setup.input + setup.output)
    if held > setup.host.dram_gib * GIB:
        reason = f"K and V are {held / GIB:.0f} GiB, the host has {setup.host.dram_gib:g}"
        return Result(system=name, batch=batch, drives=drives, reason=reason)
    rate, layers = setup.host.gpu_link_gb_per_s * 1e9, setup.model.shape.layers
    other_s = setup.gpu_s(batch) + setup.attention_s(batch)
    machine, policy = steps.host_memory(rate), FlexGen(home=HOST).layers
    total_s = steps.step_s(machine, policy, layers, setup.stored(HOST, batch), LayerTime(1e9 * other_s / layers))
    prefill_s = max(setup.prefill_gpu_s(batch), setup.kv_bytes(batch, setup.input) / rate)
    return finish(setup, name, batch, drives, prefill_s, Breakdown(total_s - other_s, 0, other_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class InStorageSystem:
    """A system whose drives attend: which method, on which copy of K, in which schedule.

    batched: one command for each layer and half of the batch instead of the runtime's work for each sequence; the GPU
    computes, and the runtime prepares, for one half while drives attend for the other.
    """

    name: str
    method: str = "dense"
    convention: BudgetConvention = "paper"
    compression: float | None = None  # None: the setup's, unless dense
    layout: str = "fp16"
    schedule: str = "serial"
    batched: bool = False
    page_share: float | None = None  # of token pages; None: the setup's

    def budget(self, compression: float, tokens: int, head_dim: int) -> SparFParams:
        """The method's budget for `tokens` stored tokens. compression: of methods without one of their own."""
        c = 1 if self.method == "dense" else self.compression or compression
        return CompressionBudget(c, self.convention).at(tokens, head_dim)

    def breakdown(self, setup: Setup, batch: int, drives: int, units: Mapping[str, float]) -> Breakdown:
        """A step's three parts from the drive's units."""
        engine_s = sum(units.get(unit, 0) for unit in ENGINE_UNITS)
        kv_s = sum(seconds for unit, seconds in units.items() if unit.startswith("flash"))
        model, link = setup.model, setup.drive.link
        layers = model.shape.layers
        kv = drives if model.latent else 2 * model.kv_heads  # a latent row goes to every drive
        rows = 2 * model.q_heads + kv  # q, k and v go down, the output comes up
        per_layer = link.transfer_ns(2 * batch * rows * model.head_dim // drives) / 1e9
        halves = 2 if self.batched else 1
        commands = halves * layers
        gpu_s, link_s = setup.gpu_s(batch / halves) * halves, layers * per_layer
        network_s = layers * crossing_s(model, setup.network, batch, drives, halves) if setup.network else 0.0
        if self.batched:  # a command and its bytes are the drives' time, the host's work goes on for the other half
            runtime_s = commands * setup.constants.sequence_layer_s
            link_s += commands * 2 * link.command_ns / 1e9
            on_gpu_s, in_drives_s = gpu_s + runtime_s, kv_s + engine_s + link_s + network_s
        else:
            runtime_s = setup.runtime_s(batch)
            on_gpu_s, in_drives_s = gpu_s + link_s + runtime_s + network_s, kv_s + engine_s
        work = LayerTime(*(1e9 * seconds / commands for seconds in (on_gpu_s, in_drives_s)))
        stored = steps.TierContents(home=CSD, tokens=setup.input, rows=dict.fromkeys(range(halves), 1))
        total_s = steps.step_s(steps.drives(), steps.in_turns, layers, stored, work)
        parts = Breakdown(kv_s, engine_s, gpu_s + link_s + runtime_s + network_s)
        hidden_s = max(0.0, parts.parts_s - total_s)
        return replace(parts, hidden_s=hidden_s, runtime_s=runtime_s, link_s=link_s, network_s=network_s)


def crossing_s(
    model: Model, network: Network, batch: int, drives: int, commands: int, copies: int = 1, kv_rows: int | None = None
) -> float:
    """Seconds that q, k, v of a layer to all drives, and outputs back, take over the port that all drives share.

    Args:
        model: The model.
        network: The port's.
        batch: Number of sequences.
        drives: Number of drives.
        commands: Commands that a drive gets for the layer.
        copies: Drives that get each query and return a partial output for it.
        kv_rows: Rows of new keys and values per sequence; None: of all KV heads.
    """
    if kv_rows is None:
        kv_rows = drives if model.latent else 2 * model.kv_heads  # a latent row goes to every drive
    out_bytes = 2 * batch * (copies * model.q_heads + kv_rows) * model.head_dim + commands * drives * COMMAND_BYTES
    in_bytes = batch * copies * model.q_heads * output_bytes(model) + commands * drives * COMPLETION_BYTES
    ns = network.transfer_ns(out_bytes) + network.transfer_ns(in_bytes) + commands * 2 * network.message_ns
    return ns / 1e9


def output_bytes(model: Model) -> int:
    """Bytes of one query head's output, with the sums that merging needs."""
    return 2 * model.head_dim + SUMS_BYTES


DENSE = InStorageSystem(name="InstI-Dense")
SPARF = InStorageSystem(name="InstI-SparF", method="sparf")
BATCHED_DENSE = InStorageSystem(name="Batched-Dense", schedule="overlapped", batched=True)
_OURS = NAMED["ours"]
assert isinstance(_OURS.budget, CompressionBudget)
OURS = InStorageSystem(
    name="Ours",
    method=_OURS.method,
    convention=_OURS.budget.convention,
    compression=_OURS.budget.c,
    layout=_OURS.layout,
    schedule="overlapped",
    batched=True,
)
PAGED = InStorageSystem(
    name="Paged", method="paged", convention="bytes", compression=4, layout="int4", schedule="overlapped", batched=True
)
IN_DRIVES = (DENSE, SPARF, OURS)
ON_HOSTS: dict[str, Callable[[Setup, int, int], Result]] = {
    "DeepSpeed": deepspeed,
    "FlexGen": flexgen,
    "FlexGen-SparQ": partial(flexgen, sparse=True),
    "GPU": resident,
    "vLLM": paged,
    "Host": offloaded,
}
