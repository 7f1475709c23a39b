"""A drive as a value: geometry and timing of its flash, its engine, its link."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from csd_spec._check import at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """NAND array. A *lane* is one plane: the unit that senses, programs and erases by itself.

    Lanes are numbered channel first: lane = (plane * dies_per_channel + die) * channels + channel.
    A *superblock* is the block of the same number in every lane. A physical page number (ppn) is
    (superblock * pages_per_block + page) * lanes + lane.
    """

    channels: int
    dies_per_channel: int
    planes_per_die: int
    blocks_per_plane: int
    pages_per_block: int
    page_bytes: int

    def __post_init__(self) -> None:
        at_least(
            1,
            channels=self.channels,
            dies_per_channel=self.dies_per_channel,
            planes_per_die=self.planes_per_die,
            blocks_per_plane=self.blocks_per_plane,
            pages_per_block=self.pages_per_block,
        )
        at_least(256, page_bytes=self.page_bytes)
        if self.page_bytes % 16:
            raise ValueError(
                f"page_bytes = {self.page_bytes}: must be a multiple of 16, up to 8 FP16 channels share a page"
            )
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NandTiming:
    """Times of one lane (ns) and rate of one channel (bytes/s).

    cache_read: a second register holds the data on its way out, so that the lane already senses the next page.
    codeword_bytes: the least that crosses the channel of a page; None is the whole page. model: of what happens where
    several want a lane or a channel, by its name in `ftl.flash.timing`.
    """

    read_ns: int
    program_ns: int
    erase_ns: int
    channel_bytes_per_s: int
    cache_read: bool = False
    codeword_bytes: int | None = None
    model: str = "calendar"

    def __post_init__(self) -> None:
        at_least(0, read_ns=self.read_ns, program_ns=self.program_ns, erase_ns=self.erase_ns)
        at_least(1, channel_bytes_per_s=self.channel_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
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

    clock_hz: int
    kernels: int
    lanes: int
    kernel_efficiency: float
    softmax_ways: int
    topk_ways: int
    nfc_bytes_per_cycle: int
    schedule: Literal["serial", "overlapped"] = "serial"

    def __post_init__(self) -> None:
        at_least(
            1,
            clock_hz=self.clock_hz,
            kernels=self.kernels,
            lanes=self.lanes,
            softmax_ways=self.softmax_ways,
            topk_ways=self.topk_ways,
            nfc_bytes_per_cycle=self.nfc_bytes_per_cycle,
        )
        if not 0 < self.kernel_efficiency <= 1:
            raise ValueError(f"kernel_efficiency = {self.kernel_efficiency}: must lie above 0 and at most at 1")
        if self.schedule not in ("serial", "overlapped"):
            raise ValueError(f"schedule = {self.schedule!r}: must be serial or overlapped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way between the model's memory and the drive.

    command_ns is the fixed cost of one command (doorbell, fetch, completion). With peer-to-peer DMA
    staging_bytes_per_s is None; when data is staged in host memory every byte crosses that copy too.
    """

    bytes_per_s: int
    command_ns: int
    staging_bytes_per_s: int | None = None

    def __post_init__(self) -> None:
        at_least(1, bytes_per_s=self.bytes_per_s)
        at_least(0, command_ns=self.command_ns)
        if self.staging_bytes_per_s is not None:
            at_least(1, staging_bytes_per_s=self.staging_bytes_per_s)

    def transfer_ns(self, nbytes: int) -> int:
        """Time for `nbytes` to cross, without the command's fixed cost."""
        ns = -(-nbytes * 1_000_000_000 // self.bytes_per_s)
        if self.staging_bytes_per_s is not None:
            ns += -(-nbytes * 1_000_000_000 // self.staging_bytes_per_s)
        return ns


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveSpec:
    """One computational storage drive.

    cache_bytes: the part of its DRAM that keeps embedding pages which are read often; the rest is for group buffers.
    """

    name: str
    geometry: Geometry
    timing: NandTiming
    engine: EngineSpec
    link: Link
    dram_bytes: int
    cache_bytes: int = 0

    def __post_init__(self) -> None:
        at_least(0, cache_bytes=self.cache_bytes)
        if self.cache_bytes and self.timing.codeword_bytes:
            raise ValueError(
                f"cache_bytes = {self.cache_bytes}: pages are kept whole, so they need codeword_bytes = None"
            )
        at_least(self.cache_bytes + self.geometry.page_bytes, dram_bytes=self.dram_bytes)

    @property
    def channel_timing(self) -> NandTiming:
        """The flash's timing with its filters: one that is slower than its channel holds it up."""
        filter_rate = self.engine.nfc_bytes_per_cycle * self.engine.clock_hz
        return replace(self.timing, channel_bytes_per_s=min(self.timing.channel_bytes_per_s, filter_rate))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DriveSpec:
        """The drive that `dataclasses.asdict` turned into `values`; raises ValueError naming what is off."""
        parts = {"geometry": Geometry, "timing": NandTiming, "engine": EngineSpec, "link": Link}
        try:
            return cls(**{key: parts[key](**value) if key in parts else value for key, value in values.items()})
        except TypeError as error:
            raise ValueError(f"drive description: {str(error).replace('.__init__()', '')}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSsdSpec:
    """A conventional page-mapped SSD as NVMeVirt models one: partitions of lanes, early write completion, lines.

    Times in ns. A *flash page* is read by one command and programmed in one shot; the mapping unit is smaller.
    Channels and the PCIe link move units of `unit_bytes`, so many of them in each slot of `slot_ns`.
    """

    name: str
    capacity_bytes: int
    channels: int
    luns_per_channel: int
    partitions: int
    blocks_per_lun: int
    mapping_bytes: int
    flash_page_bytes: int
    chunk_bytes: int
    overprovision_percent: int
    cell_levels: int
    firmware_small_ns: int
    firmware_large_ns: int
    firmware_small_bytes: int
    sense_one_unit_ns: int
    sense_ns: int
    sense_swing_ns: int
    program_ns: int
    write_base_ns: int
    write_unit_ns: int
    write_buffer_bytes: int
    gc_free_lines: int
    unit_bytes: int
    slot_ns: int
    channel_unit_ns: int
    channel_credits: int
    pcie_unit_ns: int
    pcie_credits: int

    def __post_init__(self) -> None:
        at_least(1, channels=self.channels, partitions=self.partitions, blocks_per_lun=self.blocks_per_lun)
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
