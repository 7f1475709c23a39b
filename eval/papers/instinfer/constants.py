"""Constants of the model of InstInfer without a source outside it: each is fixed by a claim, all else follows."""

from __future__ import annotations

from csd_spec.presets import INSTCSD_ZYNQ7045_8CH, PCIE3_X4_P2P, ZYNQ7045
from vcsd_eval.papers.machines import constant
from vcsd_eval.papers.paper import Constant

ENGINE = Constant(
    "kernel_rate",
    116.0,
    "multiply-accumulates a cycle",
    "two kernels of 64 lanes that are busy nine cycles in ten; in csd_spec.presets.ZYNQ7045",
    "c8b",
)
RUNTIME = constant("instinfer", "sequence_layer_us")
CACHE = Constant(
    "cached_path_gb_per_s",
    1.65,
    "GB/s",
    "reads of files: a system call and one thread's copy to a bounce buffer, and from there to the GPU; a miss of the "
    "page cache first takes the SSD's 7 GB/s. The two rows of dense attention agree on it",
    "c1, c6",
)
COPIES = Constant(
    "host_link_share",
    0.624,
    "of the GPU link's nominal rate",
    "copies from host memory, part of it pageable: weights and KV come over in 19.7 of 32 GB/s",
    "c4",
)
CALIBRATED = (ENGINE, RUNTIME, CACHE, COPIES)
PAGES = Constant(
    "token_page_share",
    0.25,
    "of token pages at 1/8",
    "half of the sparsity is kept (section IV-C), read as 1/4; selections cluster, at random it would be 0.88",
)
ASSUMED = (
    PAGES,
    Constant("softmax_ways", ZYNQ7045.softmax_ways, "scores a cycle and kernel", "does not limit the dense step"),
    Constant("topk_ways", ZYNQ7045.topk_ways, "scores a cycle", "of the assumed ones the one that takes most"),
    Constant("nfc_bytes_per_cycle", ZYNQ7045.nfc_bytes_per_cycle, "bytes", "a filter keeps up with its channel"),
    Constant("read_ns", INSTCSD_ZYNQ7045_8CH.timing.read_ns, "ns", "tR of current TLC flash"),
    Constant("command_ns", PCIE3_X4_P2P.command_ns, "ns", "an NVMe driver and controller at queue depth 1"),
)
