"""Data files of SSDs: constants and published figures, each with the name of its source. `drives()` loads all."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from csd_spec.checked import frozen_value
from nvmevirt_config.document import read_yaml
from vcsd_eval.ssd.workload import WORKLOADS

FOLDER = Path(__file__).parent
DRIVE = {
    "channels", "dies", "die_gbit", "planes", "page_kib", "read_us", "die_program_mb_per_s", "bus_mt_per_s",
    "pcie_generation", "pcie_lanes", "user_gb", "slc_cache",
}  # fmt: skip
SHARED = {
    "command_us", "tlp_overhead_bytes", "tlp_payload_bytes", "commands_per_s_channel_gen3",
    "commands_per_s_channel_gen4", "slc_program_us", "buffer_pages_per_plane",
}  # fmt: skip
UNITS = ("MB/s", "IOPS", "us")


@frozen_value
class SsdConstant:
    """A number about the hardware. source: a key of the file's `sources`."""

    value: Annotated[float, Field(ge=0)]
    source: str


@frozen_value
class PublishedFigure:
    """A published result; value None where only the configuration is published."""

    workload: str
    depth: Annotated[int, Field(ge=1, le=65536)]
    value: Annotated[float, Field(gt=0)] | None
    unit: str
    source: str

    def __post_init__(self) -> None:
        if self.workload not in WORKLOADS:
            raise ValueError(f"workload = {self.workload!r}: must be one of {', '.join(WORKLOADS)}")
        if self.unit not in UNITS:
            raise ValueError(f"unit = {self.unit!r}: must be one of {', '.join(UNITS)}")


@frozen_value
class SharedConstants:
    """Constants of every drive, by name."""

    sources: dict[str, str]
    constants: dict[str, SsdConstant]

    def __post_init__(self) -> None:
        check(self.sources, self.constants, SHARED)

    def __getitem__(self, name: str) -> float:
        return self.constants[name].value


@frozen_value
class SsdProfile:
    """An SSD: constants by name, and its published performance."""

    name: str
    sources: dict[str, str]
    constants: dict[str, SsdConstant]
    published: list[PublishedFigure]

    def __post_init__(self) -> None:
        check(self.sources, self.constants, DRIVE)
        for each in self.published:
            if each.source not in self.sources:
                raise ValueError(f"source = {each.source!r}: must be one of {', '.join(self.sources)}")

    def __getitem__(self, name: str) -> float:
        return self.constants[name].value

    @property
    def market(self) -> str:
        """Class of the drive: client drives have an SLC cache, data-centre drives none."""
        return "client" if self["slc_cache"] else "data centre"


def check(sources: dict[str, str], constants: dict[str, SsdConstant], names: set[str]) -> None:
    """Raise ValueError for a constant that is missing or unknown, or has no source."""
    if off := names ^ set(constants):
        raise ValueError(f"constants.{min(off)}: must be given if and only if it is one of {', '.join(sorted(names))}")
    for name, constant in constants.items():
        if constant.source not in sources:
            raise ValueError(f"constants.{name}.source = {constant.source!r}: must be one of {', '.join(sources)}")


def with_sources(of: SsdProfile | SharedConstants) -> dict[str, dict[str, Any]]:
    """Constants by name, with the text of each source."""
    return {
        name: {"value": constant.value, "source": of.sources[constant.source]}
        for name, constant in of.constants.items()
    }


@cache
def shared() -> SharedConstants:
    """Constants that are the same for every drive."""
    return read_yaml(FOLDER / "shared.yaml", SharedConstants)


@cache
def drives(folder: str = "drives") -> dict[str, SsdProfile]:
    """Drives of a folder by name: `drives`, or `simulators` for the defaults of other simulators."""
    found = (read_yaml(path, SsdProfile) for path in sorted((FOLDER / folder).glob("*.yaml")))
    return {drive.name: drive for drive in found}
