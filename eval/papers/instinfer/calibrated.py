"""Constants without a source outside the paper: each is fixed by one of its claims, and everything else follows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A constant, the claim that fixed it, and why it may be so."""

    name: str
    value: float
    unit: str
    fixed_by: str
    why: str


ENGINE = Calibrated(
    "kernel_rate",
    116.0,
    "multiply-accumulates a cycle",
    "c8b",
    "two kernels of 64 lanes that are busy nine cycles in ten; in csd_spec.presets.ZYNQ7045",
)
RUNTIME = Calibrated(
    "sequence_layer_us",
    172.0,
    "us for each sequence and layer",
    "c8c",
    "commands, transfers and Python of FlexGen's runtime, on which InstInfer is built: some ten calls of 15 to 20 us",
)
PAGES = Calibrated(
    "token_page_share",
    0.252,
    "of token pages at 1/8",
    "c2",
    "with the embedding pages nearly half of the dense bytes; selections cluster, at random it would be 0.88",
)
FILES = Calibrated(
    "file_path_gb_per_s",
    1.33,
    "GB/s",
    "c1",
    "reads that miss the page cache: file system, SSD and a bounce buffer in turn, not the SSD's 7 GB/s",
)
CACHE = Calibrated(
    "cached_path_gb_per_s",
    1.71,
    "GB/s",
    "c3",
    "reads that hit the page cache: a system call and one thread's copy to a bounce buffer, and from there to the GPU",
)
COPIES = Calibrated(
    "host_link_share",
    0.624,
    "of the GPU link's nominal rate",
    "c4",
    "copies from host memory, part of it pageable: weights and KV come over in 19.7 of 32 GB/s",
)
SWAP = Calibrated(
    "host_kv_copies",
    1.5,
    "copies of KV in host memory",
    "c5",
    "pinned staging beside the cache: without it 53.7 GB of KV at batch 32 would fit 96 GB beside 25.7 GB of weights",
)
ALL = (ENGINE, RUNTIME, PAGES, FILES, CACHE, COPIES, SWAP)
