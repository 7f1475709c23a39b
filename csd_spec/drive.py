"""Drive description: geometry and timing of the flash, attention engine and link."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from csd_spec.checked import Count, from_values, frozen_value

# Wide enough for any real drive; a value outside was probably given in another unit
Rate = Annotated[int, Field(ge=1_000_000, le=10**12)]
Bytes = Annotated[int, Field(ge=1, le=1 << 48)]
Time = Annotated[int, Field(ge=0, le=10**9)]


@frozen_value
class Geometry:
    """NAND array. A *lane* is one plane, the unit that senses, programs and erases independently.

    Lanes are numbered channel first: lane = (plane * dies_per_channel + die) * channels + channel.
    A *superblock* is the block of the same number in every lane. A physical page number (ppn) is
    (superblock * pages_per_block + page) * lanes + lane.

    Attributes:
        channels: Buses between flash and controller; each moves the data of one die at a time.
        dies_per_channel: Dies on one channel.
        planes_per_die: Planes of a die, its lanes.
        blocks_per_plane: Blocks of a plane; a block is the unit of erase.
        pages_per_block: Pages of a block; a page is the unit of reads and programs.
        page_bytes: Data of a page without its spare area, bytes.
    """

    channels: Annotated[int, Field(ge=1, le=1024)]
    dies_per_channel: Annotated[int, Field(ge=1, le=1024)]
    planes_per_die: Annotated[int, Field(ge=1, le=64)]
    blocks_per_plane: Count
    pages_per_block: Count
    page_bytes: Annotated[int, Field(ge=256, le=1 << 20, multiple_of=16)]  # up to 8 FP16 channels share a page

    def __post_init__(self) -> None:
        if self.lanes > 1 << 16:
            raise ValueError(f"{self.lanes} lanes: must be at most 2^16: use fewer channels, dies or planes")
        if self.pages > 2**31:
            raise ValueError(f"{self.pages} pages: must be at most 2^31: use larger pages or fewer blocks")

    @property
    def lanes(self) -> int:
        return self.channels * self.dies_per_channel * self.planes_per_die

    @property
    def blocks(self) -> int:
        return self.lanes * self.blocks_per_plane

    @property
    def superblock_pages(self) -> int:
        return self.lanes * self.pages_per_block

    @property
    def pages(self) -> int:
        return self.blocks * self.pages_per_block

    @property
    def capacity_bytes(self) -> int:
        return self.pages * self.page_bytes


@frozen_value
class NandTiming:
    """Times of one lane (ns) and rate of one channel (bytes/s).

    Attributes:
        read_ns: tR, page to register, ns.
        program_ns: tPROG, ns.
        erase_ns: tBERS, ns.
        channel_bytes_per_s: Transfer rate of a channel, bytes/s.
        cache_read: A second register holds the outgoing data, so that the lane can already sense the next page.
        codeword_bytes: Smallest transfer over a channel, bytes; None transfers whole pages.
        model: Contention model of lanes and channels, by its name in `ftl.flash.timing`.
    """

    read_ns: Annotated[int, Field(ge=1_000, le=10_000_000)]
    program_ns: Annotated[int, Field(ge=10_000, le=100_000_000)]
    erase_ns: Annotated[int, Field(ge=100_000, le=1_000_000_000)]
    channel_bytes_per_s: Rate
    cache_read: bool = False
    codeword_bytes: Annotated[int, Field(ge=16, le=1 << 20)] | None = None
    model: str = "calendar"


@frozen_value
class EngineSpec:
    """Attention engine next to the flash; `attention_engine.clock` has the formulas.

    Attributes:
        clock_hz: Clock frequency, Hz.
        kernels: Attention kernels; all of them share either matrix product of each head.
        lanes: Multiply-accumulates that one kernel starts per cycle.
        kernel_efficiency: Fraction of cycles in which a kernel starts them, from 0 to 1.
        softmax_ways: Scores per cycle of each kernel's softmax, which follows the products that compute them.
        topk_ways: Scores per cycle of argtopk, which makes three passes over its input.
        nfc_bytes_per_cycle: Bytes per cycle that the filter of one channel passes on.
        schedule: `serial` runs each phase for all heads before the next one (with it the paper's figures agree);
            `overlapped` starts each head as soon as its pages have arrived.
    """

    clock_hz: Annotated[int, Field(ge=1_000_000, le=10**10)]
    kernels: Count
    lanes: Count
    kernel_efficiency: Annotated[float, Field(gt=0, le=1)]
    softmax_ways: Count
    topk_ways: Count
    nfc_bytes_per_cycle: Count
    schedule: Literal["serial", "overlapped"] = "serial"

    @property
    def macs_per_s(self) -> float:
        """Multiply-accumulates/s of all kernels."""
        return self.kernels * self.lanes * self.kernel_efficiency * self.clock_hz


@frozen_value
class Link:
    """Path between the model's memory and the drive.

    Attributes:
        bytes_per_s: Transfer rate, bytes/s.
        command_ns: Fixed cost of one command (doorbell, fetch, completion), ns.
        staging_bytes_per_s: Copy rate of host memory if data is staged there, bytes/s; None with peer-to-peer DMA.
    """

    bytes_per_s: Rate
    command_ns: Annotated[int, Field(ge=0, le=10_000_000)]
    staging_bytes_per_s: Rate | None = None

    def transfer_ns(self, nbytes: int) -> int:
        """Transfer time of `nbytes`, without the fixed cost of a command, ns."""
        ns = -(-nbytes * 1_000_000_000 // self.bytes_per_s)
        if self.staging_bytes_per_s is not None:
            ns += -(-nbytes * 1_000_000_000 // self.staging_bytes_per_s)
        return ns


@frozen_value
class DriveSpec:
    """One computational storage drive.

    Attributes:
        name: Name of the model.
        geometry: Sizes of the NAND array.
        timing: Times of the NAND, and rate of a channel.
        engine: Attention engine.
        link: Path between the model's memory and the drive.
        dram_bytes: Drive DRAM, bytes.
        cache_bytes: Part of the DRAM that caches frequently read embedding pages, bytes; the rest is for page buffers.
    """

    name: str
    geometry: Geometry
    timing: NandTiming
    engine: EngineSpec
    link: Link
    dram_bytes: Annotated[int, Field(ge=256, le=1 << 44)]
    cache_bytes: Annotated[int, Field(ge=0, le=1 << 44)] = 0

    def __post_init__(self) -> None:
        if (self.timing.codeword_bytes or 0) > self.geometry.page_bytes:
            raise ValueError(f"codeword_bytes = {self.timing.codeword_bytes}: a page has {self.geometry.page_bytes}")
        if self.cache_bytes and self.timing.codeword_bytes:
            raise ValueError(
                f"cache_bytes = {self.cache_bytes}: the cache holds whole pages, so codeword_bytes must be null"
            )
        if self.dram_bytes < self.cache_bytes + self.geometry.page_bytes:
            raise ValueError(f"dram_bytes = {self.dram_bytes}: must hold cache_bytes and one page")

    @property
    def channel_timing(self) -> NandTiming:
        """Flash timing including the NFC filters: a filter slower than its channel limits the channel."""
        filter_rate = self.engine.nfc_bytes_per_cycle * self.engine.clock_hz
        return replace(self.timing, channel_bytes_per_s=min(self.timing.channel_bytes_per_s, filter_rate))

    @property
    def flash_bytes_per_s(self) -> int:
        """Rate of filtered pages over all channels, bytes/s."""
        return self.geometry.channels * self.channel_timing.channel_bytes_per_s

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DriveSpec:
        """Read the output of `dataclasses.asdict`; raises ValueError with the name of an invalid field."""
        return from_values(values, cls)


@frozen_value
class BlockSsdSpec:
    """Conventional page-mapped SSD as modelled by NVMeVirt: partitions of lanes, early write completion, lines.

    Times are in ns. A *flash page* is read by one command and programmed in one shot; the mapping unit is smaller.
    Channels and the PCIe link transfer units of `unit_bytes`, with `..._credits` of them per slot of `slot_ns`.

    Attributes:
        command_ns: Controller time per command, during which it handles no other one, ns; 0 for no limit.
    """

    name: str
    capacity_bytes: Bytes
    channels: Count
    luns_per_channel: Count
    partitions: Count
    blocks_per_lun: Count
    mapping_bytes: Count
    flash_page_bytes: Count
    chunk_bytes: Count
    overprovision_percent: Annotated[int, Field(ge=0, le=100)]
    cell_levels: Count
    firmware_small_ns: Time
    firmware_large_ns: Time
    firmware_small_bytes: Count
    sense_one_unit_ns: Time
    sense_ns: Time
    sense_swing_ns: Time
    program_ns: Time
    write_base_ns: Time
    write_unit_ns: Time
    write_buffer_bytes: Count
    gc_free_lines: Count
    unit_bytes: Count
    slot_ns: Count
    channel_unit_ns: Count
    channel_credits: Count
    pcie_unit_ns: Count
    pcie_credits: Count
    command_ns: Time = 0

    def __post_init__(self) -> None:
        if self.channels % self.partitions:
            raise ValueError(f"partitions = {self.partitions}: must divide the {self.channels} channels")
        if self.flash_page_bytes % self.mapping_bytes:
            raise ValueError(f"flash_page_bytes = {self.flash_page_bytes}: must be a multiple of mapping_bytes")

    @property
    def luns(self) -> int:
        """LUNs per partition."""
        return self.channels // self.partitions * self.luns_per_channel

    @property
    def flash_pages_per_block(self) -> int:
        block = -(-self.capacity_bytes // (self.partitions * self.luns * self.blocks_per_lun))
        return max(1, block // self.flash_page_bytes)

    @property
    def units_per_page(self) -> int:
        return self.flash_page_bytes // self.mapping_bytes

    @property
    def line_units(self) -> int:
        """Mapping units per line: the same block in every LUN of a partition."""
        return self.luns * self.flash_pages_per_block * self.units_per_page

    @property
    def logical_units(self) -> int:
        """Mapping units visible to the host, a multiple of the partitions."""
        physical = self.partitions * self.blocks_per_lun * self.line_units
        return physical * 100 // (100 + self.overprovision_percent) // self.partitions * self.partitions
