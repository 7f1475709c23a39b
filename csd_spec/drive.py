"""A drive as a value: geometry and timing of its flash, its engine, its link."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from csd_spec.checked import Count, from_values, value

# Wide enough for any drive there is; what is outside was written in another unit
Rate = Annotated[int, Field(ge=1_000_000, le=10**12)]
Bytes = Annotated[int, Field(ge=1, le=1 << 48)]
Time = Annotated[int, Field(ge=0, le=10**9)]


@value
class Geometry:
    """NAND array. A *lane* is one plane: the unit that senses, programs and erases by itself.

    Lanes are numbered channel first: lane = (plane * dies_per_channel + die) * channels + channel.
    A *superblock* is the block of the same number in every lane. A physical page number (ppn) is
    (superblock * pages_per_block + page) * lanes + lane.
    """

    channels: Annotated[int, Field(ge=1, le=1024)]
    dies_per_channel: Annotated[int, Field(ge=1, le=1024)]
    planes_per_die: Annotated[int, Field(ge=1, le=64)]
    blocks_per_plane: Count
    pages_per_block: Count
    page_bytes: Annotated[int, Field(ge=256, le=1 << 20, multiple_of=16)]  # up to 8 FP16 channels share a page

    def __post_init__(self) -> None:
        if self.lanes > 1 << 16:
            raise ValueError(f"{self.lanes} lanes: a drive has at most 2^16, take fewer channels, dies or planes")
        if self.pages > 2**31:
            raise ValueError(f"{self.pages} pages: a drive has at most 2^31, take larger pages or fewer blocks")

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


@value
class NandTiming:
    """Times of one lane (ns) and rate of one channel (bytes/s).

    cache_read: a second register holds the data on its way out, so that the lane already senses the next page.
    codeword_bytes: the least that crosses the channel of a page; None is the whole page. model: of what happens where
    several want a lane or a channel, by its name in `ftl.flash.timing`.
    """

    read_ns: Annotated[int, Field(ge=1_000, le=10_000_000)]
    program_ns: Annotated[int, Field(ge=10_000, le=100_000_000)]
    erase_ns: Annotated[int, Field(ge=100_000, le=1_000_000_000)]
    channel_bytes_per_s: Rate
    cache_read: bool = False
    codeword_bytes: Annotated[int, Field(ge=16, le=1 << 20)] | None = None
    model: str = "calendar"


@value
class EngineSpec:
    """The attention engine beside the flash; `attention_engine.clock` has the formulas.

    kernels: attention kernels; each takes either product of attention, by load.
    lanes: multiply-accumulates that one kernel begins in a cycle.
    kernel_efficiency: share of cycles in which it can, between 0 and 1.
    softmax_ways: scores that each kernel's softmax takes in a cycle, behind the products that make them.
    topk_ways: scores that argtopk takes in a cycle; it passes over its input three times.
    nfc_bytes_per_cycle: what the filter of one channel passes on.
    schedule: `serial`, one phase of all heads after the other (the reading under which the paper's figures agree), or
    `overlapped`, every head as soon as its pages are there.
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


@value
class Link:
    """The way between the model's memory and the drive.

    command_ns is the fixed cost of one command (doorbell, fetch, completion). With peer-to-peer DMA
    staging_bytes_per_s is None; when data is staged in host memory every byte crosses that copy too.
    """

    bytes_per_s: Rate
    command_ns: Annotated[int, Field(ge=0, le=10_000_000)]
    staging_bytes_per_s: Rate | None = None

    def transfer_ns(self, nbytes: int) -> int:
        """Time for `nbytes` to cross, without the command's fixed cost."""
        ns = -(-nbytes * 1_000_000_000 // self.bytes_per_s)
        if self.staging_bytes_per_s is not None:
            ns += -(-nbytes * 1_000_000_000 // self.staging_bytes_per_s)
        return ns


@value
class DriveSpec:
    """One computational storage drive.

    cache_bytes: the part of its DRAM that keeps embedding pages which are read often; the rest is for group buffers.
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
                f"cache_bytes = {self.cache_bytes}: pages are kept whole, so they need codeword_bytes = None"
            )
        if self.dram_bytes < self.cache_bytes + self.geometry.page_bytes:
            raise ValueError(f"dram_bytes = {self.dram_bytes}: must hold cache_bytes and a page")

    @property
    def channel_timing(self) -> NandTiming:
        """The flash's timing with its filters: one that is slower than its channel holds it up."""
        filter_rate = self.engine.nfc_bytes_per_cycle * self.engine.clock_hz
        return replace(self.timing, channel_bytes_per_s=min(self.timing.channel_bytes_per_s, filter_rate))

    @property
    def flash_bytes_per_s(self) -> int:
        """Rate at which all channels together deliver filtered pages."""
        return self.geometry.channels * self.channel_timing.channel_bytes_per_s

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DriveSpec:
        """The drive that `dataclasses.asdict` turned into `values`; raises ValueError naming what is off."""
        return from_values(values, cls)


@value
class BlockSsdSpec:
    """A conventional page-mapped SSD as NVMeVirt models one: partitions of lanes, early write completion, lines.

    Times in ns. A *flash page* is read by one command and programmed in one shot; the mapping unit is smaller.
    Channels and the PCIe link move units of `unit_bytes`, so many of them in each slot of `slot_ns`.

    Attributes:
        command_ns: Time of the controller for each command; commands pass it one after the other. 0: no limit.
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
            raise ValueError(f"flash_page_bytes = {self.flash_page_bytes}: must be whole mapping units")

    @property
    def luns(self) -> int:
        """LUNs of one partition."""
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
        """Mapping units of a line: the same block in every LUN of a partition."""
        return self.luns * self.flash_pages_per_block * self.units_per_page

    @property
    def logical_units(self) -> int:
        """Mapping units that the host sees, a multiple of the partitions."""
        physical = self.partitions * self.blocks_per_lun * self.line_units
        return physical * 100 // (100 + self.overprovision_percent) // self.partitions * self.partitions
