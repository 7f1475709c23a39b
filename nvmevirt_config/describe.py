"""A drive from a file."""

from __future__ import annotations

from pathlib import Path

import yaml

from csd_spec import DriveSpec

SHIPPED = Path(__file__).parent / "drives"


def load_drive(path: Path) -> DriveSpec:
    """The drive that a YAML file describes; raises ValueError naming the file and the field that is off."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("needs the fields of a drive: name, geometry, timing, engine, link, dram_bytes")
        return DriveSpec.from_dict(values)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error
