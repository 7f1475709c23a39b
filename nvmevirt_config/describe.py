"""A drive from a file."""

from __future__ import annotations

from pathlib import Path

from csd_spec import DriveSpec
from nvmevirt_config.document import read_yaml

SHIPPED = Path(__file__).parent / "drives"


def load_drive(path: Path) -> DriveSpec:
    """The drive that a YAML file describes; raises ValueError naming the file and the field that is off."""
    return read_yaml(path, DriveSpec)
