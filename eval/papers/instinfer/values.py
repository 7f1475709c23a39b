"""What InstInfer prints, and the constants without a source outside it: each is fixed by a claim, all else follows."""

from __future__ import annotations

from csd_spec.presets import INSTCSD_ZYNQ7045_8CH, PCIE3_X4_P2P, ZYNQ7045
from eval.papers.paper import Claim, Constant, Kind

C, P = Kind.CALIBRATED, Kind.PREDICTED
RATES = "vcsd eval throughput --batch-sizes {} --drives {}"
STEP, STEP_2, SCALING = "vcsd eval breakdown", "vcsd eval breakdown --drives 2", "vcsd eval scaling"
CLAIMS = (
    Claim("c1", "InstI-Dense over FlexGen, batch 64", 6.85, "x", "VI-C", C, RATES.format(64, 1)),
    Claim("c2", "InstI-SparF over InstI-Dense, batch 256", 2.08, "x", "VI-C", C, RATES.format(256, 1)),
    Claim(
        "c3", "InstI-SparF, batch 256, over FlexGen's best, batch 32", 11.1, "x", "VI-C", C, RATES.format("32,256", 1)
    ),
    Claim(
        "c4",
        "InstI-Dense, batch 256, over DeepSpeed's best, batch 16",
        1.046,
        "x",
        "VI-C",
        C,
        RATES.format("16,256", 1),
    ),
    Claim("c5", "DeepSpeed, batch 16 over batch 32", 32.6, "x", "VI-C", P, RATES.format("16,32", 1)),
    Claim(
        "c6", "InstI-Dense, batch 256, 2 drives, over FlexGen's best", 10.5, "x", "VI-C", P, RATES.format("32,256", 2)
    ),
    Claim(
        "c7",
        "InstI-SparF, batch 256, 2 drives, over FlexGen-SparQ, batch 32",
        3.11,
        "x",
        "VI-C",
        P,
        RATES.format("32,256", 2),
    ),
    Claim("c8a", "KV-access share of a dense step, batch 64: FlexGen", 98.9, "%", "VI-D", P, STEP),
    Claim("c8b", "the same: InstI-Dense, 1 drive", 80.7, "%", "VI-D", C, STEP),
    Claim("c8c", "the same: InstI-Dense, 2 drives", 76.4, "%", "VI-D", C, STEP_2),
    Claim("c9a", "KV-access share of a sparse step, batch 64: FlexGen-SparQ", 92.4, "%", "VI-D", P, STEP),
    Claim("c9b", "the same: InstI-SparF, 1 drive", 82.3, "%", "VI-D", P, STEP),
    Claim("c9c", "the same: InstI-SparF, 2 drives", 74.0, "%", "VI-D", P, STEP_2),
    Claim("c10a", "KV-access time cut against FlexGen, batch 64: InstI-Dense, 1 drive", 88.1, "%", "VI-D", P, STEP),
    Claim("c10b", "the same: 2 drives", 94.0, "%", "VI-D", P, STEP_2),
    Claim("c11a", "20 drives over 1, batch 256: InstI-Dense", 8.99, "x", "VI-E", P, SCALING),
    Claim("c11b", "20 drives over 1, batch 256: InstI-SparF", 7.29, "x", "VI-E", P, SCALING),
    Claim(
        "c12",
        "FlexGen has no memory for batch 128, InstI runs batch 256 (1 is yes)",
        1,
        "x",
        "VI-C",
        P,
        RATES.format("64,128,256", 1),
    ),
    Claim(
        "c13",
        "PCIe volume of decode, offloaded over in-storage, at s = 1535.5: s / 2",
        767.75,
        "x",
        "IV-D",
        P,
        "vcsd eval claims",
    ),
)
ENGINE = Constant(
    "kernel_rate",
    116.0,
    "multiply-accumulates a cycle",
    "two kernels of 64 lanes that are busy nine cycles in ten; in csd_spec.presets.ZYNQ7045",
    "c8b",
)
RUNTIME = Constant(
    "sequence_layer_us",
    172.0,
    "us for each sequence and layer",
    "commands, transfers and Python of FlexGen's runtime, on which InstInfer is built: some ten calls of 15 to 20 us",
    "c8c",
)
PAGES = Constant(
    "token_page_share",
    0.252,
    "of token pages at 1/8",
    "with the embedding pages nearly half of the dense bytes; selections cluster, at random it would be 0.88",
    "c2",
)
FILES = Constant(
    "file_path_gb_per_s",
    1.33,
    "GB/s",
    "reads that miss the page cache: file system, SSD and a bounce buffer in turn, not the SSD's 7 GB/s",
    "c1",
)
CACHE = Constant(
    "cached_path_gb_per_s",
    1.71,
    "GB/s",
    "reads that hit the page cache: a system call and one thread's copy to a bounce buffer, and from there to the GPU",
    "c3",
)
COPIES = Constant(
    "host_link_share",
    0.624,
    "of the GPU link's nominal rate",
    "copies from host memory, part of it pageable: weights and KV come over in 19.7 of 32 GB/s",
    "c4",
)
SWAP = Constant(
    "host_kv_copies",
    1.5,
    "copies of KV in host memory",
    "pinned staging beside the cache: without it 53.7 GB of KV at batch 32 would fit 96 GB beside 25.7 GB of weights",
    "c5",
)
CALIBRATED = (ENGINE, RUNTIME, PAGES, FILES, CACHE, COPIES, SWAP)
ASSUMED = (
    Constant("softmax_ways", ZYNQ7045.softmax_ways, "scores a cycle and kernel", "does not limit the dense step"),
    Constant("topk_ways", ZYNQ7045.topk_ways, "scores a cycle", "of the assumed ones the one that takes most"),
    Constant("nfc_bytes_per_cycle", ZYNQ7045.nfc_bytes_per_cycle, "bytes", "a filter keeps up with its channel"),
    Constant("read_ns", INSTCSD_ZYNQ7045_8CH.timing.read_ns, "ns", "tR of current TLC flash"),
    Constant("command_ns", PCIE3_X4_P2P.command_ns, "ns", "an NVMe driver and controller at queue depth 1"),
)
