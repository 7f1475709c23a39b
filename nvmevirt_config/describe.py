"""Loads drive descriptions."""

from __future__ import annotations

from pathlib import Path

from csd_spec import DriveSpec
from nvmevirt_config.document import read_yaml

SHIPPED = Path(__file__).parent / "drives"


def load_drive(path: Path) -> DriveSpec:
    """Load a drive description from YAML; raises ValueError with the file and the invalid field."""
    return read_yaml(path, DriveSpec)
