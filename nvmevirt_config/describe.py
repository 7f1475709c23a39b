"""A drive from a file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from csd_spec import DriveSpec

# What is outside was written in another unit
PLAUSIBLE: dict[str, tuple[float, float]] = {
    "read_ns": (1_000, 10_000_000),
    "program_ns": (10_000, 100_000_000),
    "erase_ns": (100_000, 1_000_000_000),
    "channel_bytes_per_s": (1e6, 1e11),
    "clock_hz": (1e6, 1e10),
    "bytes_per_s": (1e7, 1e12),
    "command_ns": (0, 10_000_000),
    "page_bytes": (256, 1 << 20),
    "dram_bytes": (1 << 16, 1 << 44),
}
SHIPPED = Path(__file__).parent / "drives"


def load_drive(path: Path) -> DriveSpec:
    """The drive that a YAML file describes; raises ValueError naming the file and the field that is off."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("needs the fields of a drive: name, geometry, timing, engine, link, dram_bytes")
        drive = DriveSpec.from_dict(values)
        check_plausible(asdict(drive))
        return drive
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error


def check_plausible(values: dict[str, Any]) -> None:
    """Raise ValueError for a number that no drive has, or that is not whole."""
    for name, value in values.items():
        if isinstance(value, dict):
            check_plausible(value)
        elif isinstance(value, float) and name != "kernel_efficiency":
            raise ValueError(f"{name} = {value:g}: must be a whole number")
        elif name in PLAUSIBLE and not PLAUSIBLE[name][0] <= value <= PLAUSIBLE[name][1]:
            low, high = PLAUSIBLE[name]
            raise ValueError(f"{name} = {value:g}: must lie between {low:g} and {high:g}, in the key's unit")
