"""HILOS and its baselines: seconds of a decode step, each a few terms over the one cost model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from csd_spec import ModelShape
from kv_cache.cost import CostModel, Decoder, DenseDecoder
from vcsd_eval.papers.hilos.inputs import Inputs
from vcsd_eval.papers.machines import overlay
from vcsd_eval.papers.profiles import Gpu, Host, Model, Ssd

GB, GIB = 1e9, 2**30
BATCH, OUTPUT = 16, 64  # sequences; output tokens of each
ON_STORAGE = 100e9  # parameters above which weights are kept on storage
FRACTIONS = (0.0, 1 / 8, 1 / 4, 1 / 2, 1.0)  # of the batch whose layer input is stored instead of keys and values
GPU, HOST, SSD, A6000 = Gpu.load("a100-40gb"), Host.load("xeon6342"), Ssd.load("pm9a3"), Gpu.load("a6000")
load_model = cache(Model.load)


@dataclass(frozen=True, slots=True)
class HilosBatch:
    """A batch of equal sequences in decode, with `tokens` stored tokens each."""

    model: Model
    tokens: int
    batch: int = BATCH

    @property
    def weights_on_storage(self) -> bool:
        return self.model.parameters_billion * 1e9 > ON_STORAGE

    @property
    def weight_bytes(self) -> float:
        """Bytes of a layer's weights, all experts included: they are prefetched before a router chooses."""
        return self.model.weight_bytes / self.model.layers

    @property
    def kv_bytes(self) -> float:
        """Bytes of the KV cache of the batch in a layer."""
        return self.batch * self.tokens * self.model.shape.kv_bytes_per_token / self.model.layers

    @property
    def x_bytes(self) -> float:
        """Bytes of the layer's input of all tokens of the batch, FP16."""
        return 2.0 * self.batch * self.tokens * self.model.q_heads * self.model.head_dim

    def rate(self, layer_s: float) -> float:
        """Tokens/s."""
        return self.batch / (self.model.layers * layer_s)


def join(overlap: float, *parts_s: float) -> float:
    """Seconds of concurrent parts; the longest hides a fraction `overlap` of the others."""
    longest = max(parts_s)
    return longest + (1 - overlap) * (sum(parts_s) - longest)


def link_bytes(shape: ModelShape) -> int:
    """Bytes for each layer, sequence and decode step: q, k and v to the drives, the output back, FP16."""
    return 2 * (2 * shape.q_heads + 2 * shape.kv_heads) * shape.head_dim


def formula_fraction(drive_rate: float, link_rate: float) -> float:
    """The paper's alpha, at most 1: flash reads (2 - alpha units) take as long as link transfers (alpha units)."""
    return min(1.0, 2 * link_rate / (drive_rate + link_rate))


@dataclass(frozen=True, slots=True)
class Systems:
    """All systems under one draw of inputs; `flex`, `uvm`, `hilos` and `cluster` return decode throughput, tokens/s."""

    inputs: Inputs
    gpu: Gpu = GPU

    def cost(self, decoder: Decoder) -> CostModel:
        return CostModel.of(decoder, self.gpu.accelerator, replace(overlay("hilos"), mfu=self.inputs.mfu))

    def raid(self, drives: int = 4) -> float:
        """Bytes/s from a RAID-0 array of conventional drives to host memory."""
        i = self.inputs
        return GB * min(i.ssd_path_gb_per_s, drives * SSD.read_gb_per_s * i.ssd_fraction)

    def raid16(self) -> float:
        """The same from 16 computational drives used as plain SSDs."""
        i = self.inputs
        return GB * min(i.ssd_path_gb_per_s * i.raid16_factor, i.uplink_gb_per_s, 16 * i.drive_gb_per_s)

    def flex_parts(self, work: HilosBatch, rate: float) -> tuple[float, float, float, float]:
        """FlexGen, seconds of a layer: loading KV data at `rate` bytes/s, loading weights, CPU attention, GPU work."""
        i = self.inputs
        weights_s = work.weight_bytes / (GB * i.gpu_link_gb_per_s)
        if work.weights_on_storage:
            weights_s = max(weights_s, work.weight_bytes / min(rate, self.raid()))
        gpu_s = self.cost(work.model).linear_s(work.batch) / work.model.layers
        return work.kv_bytes / rate, weights_s, work.kv_bytes / (GB * i.cpu_attention_gb_per_s), gpu_s

    def flex(self, work: HilosBatch, rate: float | None = None) -> float:
        """FlexGen; KV data is loaded at `rate` bytes/s, by default that of four conventional drives.

        Weights on storage share its path.
        """
        load_s, weights_s, *compute_s = self.flex_parts(work, rate or self.raid())
        loads_s = load_s + weights_s if work.weights_on_storage else max(load_s, weights_s)
        return work.rate(join(self.inputs.flex_overlap, loads_s, sum(compute_s)))

    def host_batch(self, model: Model, tokens: int) -> int:
        """Sequences whose KV cache fits in host memory; 0 if none does."""
        room = self.inputs.host_memory_fraction * HOST.dram_gib * GIB
        room -= 0 if HilosBatch(model, tokens).weights_on_storage else model.weight_bytes
        return max(0, min(BATCH, int(room // ((tokens + OUTPUT) * model.shape.kv_bytes_per_token))))

    def uvm(self, work: HilosBatch) -> float:
        """DeepSpeed with the KV cache in unified virtual memory: the GPU attends, pages and weights share its link."""
        i, cost = self.inputs, self.cost(work.model)
        link_s = work.kv_bytes / (GB * i.uvm_gb_per_s) + work.weight_bytes / (GB * i.gpu_link_gb_per_s)
        storage_s = work.weights_on_storage * work.weight_bytes / self.raid()
        gpu_s = cost.decode_s(work.batch, work.batch * work.tokens) / work.model.layers
        return work.rate(join(i.flex_overlap, link_s, storage_s, gpu_s))

    def hilos(self, work: HilosBatch, drives: int, fraction: float | None = None, buffered: int = 16) -> float:
        """HILOS: drives attend for one part of the batch, the GPU for the other from stored layer inputs.

        Args:
            work: The batch.
            drives: Computational drives.
            fraction: Fraction of the batch whose layer input is stored (alpha); None: chosen by the scheduler.
            buffered: Tokens in host memory before they are written (c); 1: no delayed writes.
        """
        fraction = self.fraction(work, drives, buffered) if fraction is None else fraction
        layer_s = join(self.inputs.hilos_overlap, *self.hilos_parts(work, drives, fraction))
        layer_s += self._writes_s(work, fraction, buffered) + 1e-3 * self.inputs.layer_ms
        return work.rate(layer_s)

    def hilos_parts(self, work: HilosBatch, drives: int, fraction: float) -> tuple[float, float, float, float]:
        """Seconds of a layer: drives, transfers to the GPU, weights from storage, GPU work."""
        i, model = self.inputs, work.model
        kv, x = (1 - fraction) * work.kv_bytes, fraction * work.x_bytes
        flash_s = (kv + x) / (GB * drives * i.drive_gb_per_s)
        drives_s = join(i.kernel_overlap, flash_s, kv / (GB * drives * i.drive_dram_gb_per_s))
        moved = x + (1 - fraction) * work.batch * link_bytes(model.shape)
        direct_s = moved / (GB * min(i.direct_gb_per_s, drives * i.drive_gb_per_s))
        link_s = max(direct_s, (x + work.weight_bytes) / (GB * i.gpu_link_gb_per_s))
        storage_s = work.weights_on_storage * work.weight_bytes / self.raid()
        tokens, projection = fraction * work.batch * work.tokens, 2 * model.q_heads * model.kv_heads * model.head_dim**2
        recompute_s = self.cost(DenseDecoder(model.shape, projection)).linear_s(tokens) if tokens else 0.0
        gpu_s = recompute_s + self.cost(model).decode_s(work.batch, round(tokens)) / model.layers
        return drives_s, link_s, storage_s, gpu_s

    def fraction(self, work: HilosBatch, drives: int, buffered: int = 16) -> float:
        """Alpha of the scheduler: a power of two, by the paper's formula or by the shortest step; 0 if X is larger."""
        i = self.inputs
        if work.x_bytes >= work.kv_bytes:
            return 0.0
        if i.alpha_rule < 0.5:
            flash = drives * i.drive_gb_per_s
            return 2.0 ** round(math.log2(formula_fraction(flash, min(i.direct_gb_per_s, flash))))
        return max(FRACTIONS, key=lambda fraction: self.hilos(work, drives, fraction, buffered))

    def _writes_s(self, work: HilosBatch, fraction: float, buffered: int) -> float:
        """Seconds of a layer to write new entries, and to copy values of the host's buffer to the drives."""
        i, model = self.inputs, work.model
        attended = (1 - fraction) * work.batch * model.kv_heads
        visible = i.flush_visible_fraction if buffered > 1 else 1.0
        write_s = visible * (2 * attended + fraction * work.batch) / buffered * 1e-6 * i.entry_write_us
        return write_s + (buffered - 1) / 2 * attended * 2 * model.head_dim / (GB * i.buffer_copy_gb_per_s)

    def cluster(self, model: Model, tokens: int) -> float:
        """vLLM on two pipeline stages of four tensor-parallel GPUs.

        Weights that do not fit in GPU memory with one sequence are copied from host memory in every step.
        """
        i, stage = self.inputs, A6000.times(4)
        room, one = 2 * 0.9 * stage.memory_gib * GIB, (tokens + OUTPUT) * model.shape.kv_bytes_per_token
        batch = max(1, min(BATCH, int((room - model.weight_bytes) // one)))
        copied = max(0.0, model.weight_bytes + batch * one - room)
        share = -(-batch // 2)  # two micro-batches keep both stages busy
        gpu_s = replace(self, gpu=stage).cost(model).decode_s(share, share * tokens) / 2 / i.gpu_memory_fraction
        stage_s = gpu_s + copied / 2 / (4 * GB * i.gpu_link_gb_per_s) + model.layers * 1e-6 * i.allreduce_us
        return batch / (2 * stage_s)
