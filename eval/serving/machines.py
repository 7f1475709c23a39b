"""Machines to serve on: fitted lines, and drives that attend."""

from __future__ import annotations

from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from eval.papers.profiles import Model
from ftl import LAYOUTS
from serving.engine import Drives, Engine

PREFILL_TOKENS_PER_S = 6000  # assumed: an 8B model on such a GPU
CALL_S = 20e-6  # assumed: of a command to drives, and its completion
LONGEST = 1 << 15  # tokens of a sequence

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


def drives(count: int, bits: int = 16) -> Drives:
    """InstCSDs that attend to all of what lies in them, side by side, as fast as their flash is read.

    bits: the layout of K and V, as `SeqCreate.embedding_bits` names it; those with planes keep them in 8 bits.
    """
    shape, spec = Model.load("llama-3-8b").shape, INSTCSD_ZYNQ7045_8CH
    form = LAYOUTS[bits].form(spec.geometry.page_bytes, shape.head_dim, LONGEST)
    pages = 1 if form.planes else 2  # of a head's group of n tokens: both in one, or K and V apart
    return Drives(
        bytes_per_s=float(count * spec.geometry.channels * spec.channel_timing.channel_bytes_per_s),
        token_bytes=shape.kv_heads * pages * spec.geometry.page_bytes / form.n,
        call_s=CALL_S,
    )
