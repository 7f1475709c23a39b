"""Machines to serve on: fitted lines, and drives that attend."""

from __future__ import annotations

from csd_spec.layouts import layout_named
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from eval.papers.profiles import Gpu, Host, Model
from serving.engine import Drives, Engine
from serving.placement import BLOCK_TOKENS

PREFILL_TOKENS_PER_S = 6000  # assumed: an 8B model on such a GPU
CALL_S = 20e-6  # assumed: of a command to drives, and its completion
LONGEST = 1 << 17  # tokens of a sequence
USED = 0.9  # assumed: of GPUs' memory, by weights and K and V; the rest is for activations
MULTIPLIED = 0.5  # assumed: of GPUs' TFLOPS, in prefill

# The lines are those of OrbitFlow's public profiles (VLDB 2026): a step, and a transfer of everything to the GPU, each
# over tokens. Rooms are what its traces take as the longest request that needs no offloading.
A5000 = Engine(
    name="Llama-3-8B on an A5000, PCIe 3 x16",
    layers=32,
    step_s=0.0495,
    token_s=9.63e-7,
    fetch_s=0.0139,
    fetch_token_s=1.72e-5,
    room_blocks=611,
    prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
)
A6000 = Engine(
    name="Llama-3-8B on an A6000, PCIe 4 x16",
    layers=32,
    step_s=0.0406,
    token_s=6.74e-7,
    fetch_s=0.0106,
    fetch_token_s=1.87e-5,
    room_blocks=611,
    prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
)


def _room_blocks(model: Model, gpu: Gpu, gpus: int) -> int:
    """Of a layer, that GPUs hold beside the weights."""
    free_bytes = USED * gpus * gpu.memory_gib * 2**30 - model.weight_bytes
    return int(free_bytes / model.shape.kv_bytes_per_token / BLOCK_TOKENS)


def by_data_sheet(model: Model, gpu: Gpu, gpus: int, host: Host) -> Engine:
    """A model spread evenly over GPUs, each with a link of its own to the host, as fast as data sheets say: a step
    reads the weights and K and V once, links carry what they may. What GPUs tell each other takes no time."""
    memory, multiplied = gpus * gpu.memory_gb_per_s * 1e9, gpus * MULTIPLIED * gpu.fp16_tflops * 1e12
    shape = model.shape
    number = f"{gpus} " if gpus > 1 else ""
    return Engine(
        name=f"{model.name} on {number}{gpu.name}, by data sheets",
        layers=shape.layers,
        step_s=model.weight_bytes / memory,
        token_s=shape.kv_bytes_per_token / memory,
        fetch_s=shape.layers * host.gpu_link_us * 1e-6,
        fetch_token_s=shape.kv_bytes_per_token / (gpus * host.gpu_link_gb_per_s * 1e9),
        room_blocks=_room_blocks(model, gpu, gpus),
        prefill_tokens_per_s=multiplied / model.weight_bytes,  # two operations a weight, of two bytes
        prefill_pair_s=4 * shape.layers * shape.q_heads * shape.head_dim / multiplied,
    )


_8B, _70B = Model.load("llama-3-8b"), Model.load("llama-3-70b")
_A6000 = Gpu.load("a6000")
A6000_4 = Engine(
    name="Llama-3-70B on 4 A6000, PCIe 4 x16",
    layers=80,
    step_s=0.132,
    token_s=1.16e-6,
    fetch_s=0.0238,
    fetch_token_s=5.51e-5,
    room_blocks=_room_blocks(_70B, _A6000, 4),
    prefill_tokens_per_s=4 * MULTIPLIED * _A6000.fp16_tflops * 1e12 / _70B.weight_bytes,
    prefill_pair_s=4 * 80 * 64 * 128 / (4 * MULTIPLIED * _A6000.fp16_tflops * 1e12),
)
ENGINES = {
    "a5000": A5000,
    "a6000": A6000,
    "4xa6000": A6000_4,
    "h100": by_data_sheet(_8B, Gpu.load("h100"), 1, Host.load("pcie5")),
    "8xa100": by_data_sheet(_70B, Gpu.load("a100"), 8, Host.load("pcie4")),
    "8xh100": by_data_sheet(_70B, Gpu.load("h100"), 8, Host.load("pcie5")),
}


def drives(count: int, layout: str = "fp16") -> Drives:
    """InstCSDs that attend to all of what lies in them, side by side, as fast as their flash is read.

    A layer is as large in all models of `ENGINES`.

    layout: The layout of K and V, by name; those with planes keep them in 8 bits.
    """
    shape, spec = _8B.shape, INSTCSD_ZYNQ7045_8CH
    form = layout_named(layout).form(spec.geometry.page_bytes, shape.head_dim, LONGEST)
    pages = 1 if form.planes else 2  # of a head's group of n tokens: both in one, or K and V apart
    return Drives(
        bytes_per_s=float(count * spec.geometry.channels * spec.channel_timing.channel_bytes_per_s),
        token_bytes=shape.kv_heads * pages * spec.geometry.page_bytes / form.n,
        call_s=CALL_S,
    )
