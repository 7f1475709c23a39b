"""Drive, link and SSD presets, by name."""

from __future__ import annotations

from dataclasses import replace

from csd_spec.drive import BlockSsdSpec, DriveSpec, EngineSpec, Geometry, Link, NandTiming

# PCIe 3.0: 8 GT/s per lane, 128b/130b coding. The command cost is that of a current NVMe driver and controller at queue
# depth 1, without the medium (assumed).
PCIE3_X4_P2P = Link(bytes_per_s=3_938_000_000, command_ns=5_000)
"""GPU and drive exchange data directly, bypassing the host (InstInfer, section IV-A)."""

PCIE3_X4_STAGED = Link(bytes_per_s=3_938_000_000, command_ns=15_000, staging_bytes_per_s=12_000_000_000)
"""Data is copied through host memory (assumed copy rate: memcpy on one core)."""

ZYNQ7045 = EngineSpec(
    clock_hz=285_000_000,
    kernels=2,
    lanes=64,
    kernel_efficiency=0.906,
    softmax_ways=4,
    topk_ways=32,
    nfc_bytes_per_cycle=8,
)
"""InstInfer's engine: two kernels at 285 MHz (section V).

lanes and kernel_efficiency, 116 multiply-accumulates per cycle in total, are *calibrated* to the KV-access shares of
figure 14 (claim c8): 0.137 of a dense step at batch 64 and S = 1536 is spent computing. Plausible: 768 DSPs for 128
FP16 lanes are 6 each, and a tenth of the cycles is lost when switching heads. softmax_ways, topk_ways and
nfc_bytes_per_cycle are assumed, each wide enough not to limit the paper's dense step."""

INSTCSD_ZYNQ7045_8CH = DriveSpec(
    name="instcsd-zynq7045-8ch",
    geometry=Geometry(
        channels=8,
        dies_per_channel=8,
        planes_per_die=4,
        blocks_per_plane=4096,
        pages_per_block=512,
        page_bytes=4096,
    ),
    timing=NandTiming(
        read_ns=50_000,
        program_ns=600_000,
        erase_ns=5_000_000,
        channel_bytes_per_s=1_400_000_000,
    ),
    engine=ZYNQ7045,
    link=PCIE3_X4_P2P,
    dram_bytes=4 << 30,
)
"""InstInfer's evaluated device: 8 channels x 1.4 GB/s and an engine sized for a Zynq 7045.

From the paper (section VI-A): channels, channel rate, page size, engine. Assumed, since the paper does not state it:
2 TB in 8 dies x 4 planes x 512-page blocks, tR, tPROG, tBERS, PCIe 3.0 x4, and 4 GiB of DRAM: the prototype has 2, but
unfinished KV groups of 256 sequences of OPT-13B that grow in lockstep take up to 3.3 GB.
"""

INSTCSD_OVERLAPPED = replace(
    INSTCSD_ZYNQ7045_8CH, name="instcsd-overlapped", engine=replace(ZYNQ7045, schedule="overlapped")
)
"""The same drive with the overlapped schedule: each head starts as soon as its pages have arrived."""

DRIVES = {drive.name: drive for drive in (INSTCSD_ZYNQ7045_8CH, INSTCSD_OVERLAPPED)}

NVMEVIRT_970PRO = BlockSsdSpec(
    name="nvmevirt-970pro",
    capacity_bytes=32 << 30,
    channels=8,
    luns_per_channel=2,
    partitions=4,
    blocks_per_lun=8192,
    mapping_bytes=4096,
    flash_page_bytes=32768,
    chunk_bytes=16384,
    overprovision_percent=7,
    cell_levels=2,
    firmware_small_ns=21_500,
    firmware_large_ns=30_490,
    firmware_small_bytes=16384,
    sense_one_unit_ns=35_760,
    sense_ns=36_013,
    sense_swing_ns=6_000,
    program_ns=185_000,
    write_base_ns=4_000,
    write_unit_ns=460,
    write_buffer_bytes=1 << 20,
    gc_free_lines=2,
    unit_bytes=128,
    slot_ns=4_000,
    channel_unit_ns=152,
    channel_credits=26,
    pcie_unit_ns=36,
    pcie_credits=110,
)
"""NVMeVirt's SAMSUNG_970PRO preset on 32 GiB (github.com/snu-csl/nvmevirt, commit 61c90f7)."""

BLOCK_SSDS = {ssd.name: ssd for ssd in (NVMEVIRT_970PRO,)}
