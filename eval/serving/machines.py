"""Machines to serve on: fitted lines, and drives that attend."""

from __future__ import annotations

from dataclasses import replace

from csd_spec import DriveSpec
from csd_spec.layouts import layout_named
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from kv_cache.cost import CostModel, DriveModel, Overlay, ServingCost
from kv_cache.planner.problem import BLOCK_TOKENS
from vcsd_eval.papers.machines import overlay
from vcsd_eval.papers.profiles import Gpu, Host, Model

CALL_S = 20e-6  # assumed: of a command to drives, and its completion
LONGEST = 1 << 17  # tokens of a sequence
USED = 0.9  # assumed: fraction of GPU memory for weights and KV cache; the rest is for activations

_8B, _70B = Model.load("llama-3-8b"), Model.load("llama-3-70b")


def by_profile(name: str, gpu: str, link: str, fetch_s: float, fetch_token_s: float) -> ServingCost:
    """Llama-3-8B by OrbitFlow's public profiles (VLDB 2026): a step, and a transfer of everything to the GPU, each a
    line over tokens. The room is what its traces take as the longest request that needs no offloading."""
    return ServingCost(
        name=f"Llama-3-8B on an {gpu}, {link} x16",
        compute=CostModel(_8B.layers, overlay("orbitflow", name)),
        fetch_s=fetch_s,
        fetch_token_s=fetch_token_s,
        room_blocks=611,
    )


A5000 = by_profile("a5000", "A5000", "PCIe 3", 0.0139, 1.72e-5)
A6000 = by_profile("a6000", "A6000", "PCIe 4", 0.0106, 1.87e-5)


def _room_blocks(model: Model, gpu: Gpu, gpus: int) -> int:
    """Blocks of a layer that fit in GPU memory next to the weights."""
    free_bytes = USED * gpus * gpu.memory_gib * 2**30 - model.weight_bytes
    return int(free_bytes / model.shape.kv_bytes_per_token / BLOCK_TOKENS)


def by_data_sheet(model: Model, gpu: Gpu, gpus: int, host: Host) -> ServingCost:
    """A model spread evenly over GPUs, each with a link of its own to the host; the base of the cost model. What GPUs
    tell each other takes no time."""
    shape = model.shape
    number = f"{gpus} " if gpus > 1 else ""
    return ServingCost(
        name=f"{model.name} on {number}{gpu.name}, by data sheets",
        compute=CostModel.of(model, gpu.times(gpus).accelerator),
        fetch_s=shape.layers * host.gpu_link_us * 1e-6,
        fetch_token_s=shape.kv_bytes_per_token / (gpus * host.gpu_link_gb_per_s * 1e9),
        room_blocks=_room_blocks(model, gpu, gpus),
    )


_A6000 = Gpu.load("a6000")
A6000_4 = ServingCost(
    name="Llama-3-70B on 4 A6000, PCIe 4 x16",
    compute=CostModel.of(_70B, _A6000.times(4).accelerator, Overlay(step_s=0.132, token_s=1.16e-6)),
    fetch_s=0.0238,
    fetch_token_s=5.51e-5,
    room_blocks=_room_blocks(_70B, _A6000, 4),
)
COSTS = {
    "a5000": A5000,
    "a6000": A6000,
    "4xa6000": A6000_4,
    "h100": by_data_sheet(_8B, Gpu.load("h100"), 1, Host.load("pcie5")),
    "8xa100": by_data_sheet(_70B, Gpu.load("a100"), 8, Host.load("pcie4")),
    "8xh100": by_data_sheet(_70B, Gpu.load("h100"), 8, Host.load("pcie5")),
}


def drives(count: int, layout: str = "fp16", spec: DriveSpec = INSTCSD_ZYNQ7045_8CH) -> DriveModel:
    """Drives that attend concurrently to all their KV data, at the rates of their flash and engines.

    A layer has the same size in all models of `COSTS`.

    Args:
        count: Number of drives.
        layout: Name of the layout of the KV cache; progressive ones store it in 8 bits.
        spec: Specification of each drive.
    """
    shape = _8B.shape
    form = layout_named(layout).form(spec.geometry.page_bytes, shape.head_dim, LONGEST)
    pages = 1 if form.progressive else 2  # per head and group of n tokens: one shared page, or separate ones
    token_bytes = shape.kv_heads * pages * spec.geometry.page_bytes / form.n
    attended = token_bytes * spec.engine.macs_per_s / (2 * shape.q_heads * shape.head_dim)  # bytes/s
    rate = float(count * min(spec.flash_bytes_per_s, attended))
    return DriveModel(bytes_per_s=rate, token_bytes=token_bytes, call_s=CALL_S)


def beside_plain_ssds(cost: ServingCost, count: int, spec: DriveSpec = INSTCSD_ZYNQ7045_8CH) -> ServingCost:
    """A machine with the same flash without engines: KV data comes from host memory and over the drives' links at once.

    A part of every layer comes from each, prefetched as that from host memory is.
    """
    rate = count * min(spec.flash_bytes_per_s, spec.link.bytes_per_s) / (cost.layers * cost.token_bytes)
    return replace(cost, fetch_token_s=1 / (1 / cost.fetch_token_s + rate))
