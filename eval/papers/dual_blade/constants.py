"""Constants of the model of Dual-Blade (arXiv 2604.26557) that the paper does not print."""

from __future__ import annotations

from vcsd_eval.papers.paper import Constant

MEMORY_COPY = Constant(
    "memory_copy_gb_per_s",
    20.8,
    "GB/s",
    "two threads from the page cache to pinned memory: a third of two channels of DDR5, which a copy reads and writes",
    "d19a",
)
HINDERED = Constant(
    "hindered_share",
    0.43,
    "of a read's rate, while the GPU's DMA runs",
    "reads of SSD and page cache write the memory that DMA reads; 1 would be the ideal overlap",
    "d19b",
)
CALIBRATED = (MEMORY_COPY, HINDERED)
ANONYMOUS = Constant("anonymous_gib", 1.0, "GiB", "of the limit, what the runtime's own memory takes")
GPU_LINK = Constant("gpu_link_gb_per_s", 28.0, "GB/s", "PCIe 5.0 x8 as far as it can be used; in the host's profile")
TFLOPS = Constant("fp16_tflops", 47.4, "TFLOPS", "dense FP16 by tensor cores, not verified; in the GPU's profile")
AHEAD = Constant("layers_ahead", 0, "layers", "nothing hides the GPU's work: a layer comes when the one before is done")
COMMAND_A = Constant(
    "write_us", 15.0, "us", "a write of SSD A without its bytes; in its profile, B's is the data sheet's"
)
ASSUMED = (ANONYMOUS, GPU_LINK, TFLOPS, AHEAD, COMMAND_A)
