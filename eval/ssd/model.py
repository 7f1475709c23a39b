"""A drive's constants as a `BlockSsdSpec`, and a workload on it: no constant comes from a result."""

from __future__ import annotations

from csd_spec import BlockSsdSpec
from vcsd_eval.baselines.conventional import ConventionalSsd
from vcsd_eval.ssd.profile import PublishedFigure, SsdProfile, shared
from vcsd_eval.ssd.workload import WORKLOADS, Workload

SIMULATED_BYTES = 12 << 30  # with the drive's planes, over-provisioning and rates, and fewer pages to a block
LINES = 512
UNIT_BYTES, SLOT_NS = 128, 8_000
GIGATRANSFERS = {3: 8, 4: 16}  # of a PCIe lane; 128b/130b coding
REQUESTS = 60_000
MEASURED_BYTES = 512 << 20  # less than the space that is free at the start, so that no block is collected


def link_bytes_per_s(drive: SsdProfile) -> float:
    """Payload that the PCIe link moves, after coding and packet headers."""
    payload, overhead = shared()["tlp_payload_bytes"], shared()["tlp_overhead_bytes"]
    raw = GIGATRANSFERS[int(drive["pcie_generation"])] * 1e9 * 128 / 130 / 8 * drive["pcie_lanes"]
    return raw * payload / (payload + overhead)


def program_ns(drive: SsdProfile, in_cache: bool) -> int:
    """Time in which a plane programs one page; all planes of a die program at once."""
    if in_cache and drive["slc_cache"]:
        return round(shared()["slc_program_us"] * 1e3)
    return round(drive["planes"] * drive["page_kib"] * 1024 / drive["die_program_mb_per_s"] * 1e3)


def block_ssd(drive: SsdProfile, in_cache: bool = False) -> BlockSsdSpec:
    """The drive as the model of a conventional SSD takes it: each plane is a LUN.

    Args:
        drive: Constants.
        in_cache: Whether writes go to its SLC cache.
    """
    channels, page = int(drive["channels"]), int(drive["page_kib"]) << 10
    planes = int(drive["dies"]) // channels * int(drive["planes"])
    line = channels * planes * page
    pages = max(1, SIMULATED_BYTES // (line * LINES))
    raw_bytes = drive["dies"] * drive["die_gbit"] * 2**30 / 8
    commands_per_s = shared()[f"commands_per_s_channel_gen{int(drive['pcie_generation'])}"] * channels
    bus, link = drive["bus_mt_per_s"] * 1e6, link_bytes_per_s(drive)
    sense_ns, command_ns = round(drive["read_us"] * 1e3), round(shared()["command_us"] * 1e3)
    return BlockSsdSpec(
        name=drive.name,
        capacity_bytes=line * LINES * pages,
        channels=channels,
        luns_per_channel=planes,
        partitions=1,
        blocks_per_lun=LINES,
        mapping_bytes=4096,
        flash_page_bytes=page,
        chunk_bytes=page,
        overprovision_percent=round(100 * (raw_bytes / (drive["user_gb"] * 1e9) - 1)),
        cell_levels=1,
        firmware_small_ns=command_ns,
        firmware_large_ns=command_ns,
        firmware_small_bytes=4096,
        sense_one_unit_ns=sense_ns,
        sense_ns=sense_ns,
        sense_swing_ns=0,
        program_ns=program_ns(drive, in_cache),
        write_base_ns=command_ns,
        write_unit_ns=0,
        write_buffer_bytes=round(shared()["buffer_pages_per_plane"]) * line,
        gc_free_lines=2,
        unit_bytes=UNIT_BYTES,
        slot_ns=SLOT_NS,
        channel_unit_ns=max(1, round(UNIT_BYTES / bus * 1e9)),
        channel_credits=round(bus * SLOT_NS / 1e9 / UNIT_BYTES),
        pcie_unit_ns=round(UNIT_BYTES / link * 1e9),
        pcie_credits=round(link * SLOT_NS / 1e9 / UNIT_BYTES),
        command_ns=round(1e9 / commands_per_s),
    )


def requests(load: Workload, spec: BlockSsdSpec, depth: int) -> int:
    """Requests of a run: enough for a steady mean, and for steady state where the workload asks for it."""
    if load.overwrites:
        return (load.overwrites + 1) * spec.logical_units
    if depth == 1:
        return 4_000
    if load.read_percent == 100 and not load.sequential:
        return max(REQUESTS, 100 * depth)
    return MEASURED_BYTES // load.block_bytes


def simulate(drive: SsdProfile, figure: PublishedFigure) -> float:
    """The published quantity in the model: of a closed loop, rate = depth / mean latency (Little).

    Args:
        drive: Constants.
        figure: Workload, depth and unit.

    Returns:
        MB/s, requests a second or us, by `figure.unit`.
    """
    load = WORKLOADS[figure.workload]
    spec = block_ssd(drive, load.in_cache)
    count = requests(load, spec, figure.depth)
    run = ConventionalSsd(spec).closed_loop
    _, latencies = run(figure.depth, count, load.block_bytes, load.read_percent, sequential=load.sequential)
    mean_s = float(latencies[count * 3 // 4 if load.overwrites else count // 2 :].mean()) / 1e9
    if figure.unit == "us":
        return mean_s * 1e6
    rate = figure.depth / mean_s
    return rate * load.block_bytes / 1e6 if figure.unit == "MB/s" else rate
