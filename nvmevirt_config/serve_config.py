"""Which drives to serve, from one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from csd_link.served_drive import DEFAULT, ServedDrive, ServedDrives
from csd_link.window import WindowLayout
from csd_spec import DriveSpec
from csd_spec.presets import DRIVES, INSTCSD_ZYNQ7045_8CH
from nvmevirt_config.describe import check_plausible, load_drive

_PATHS = ("path", "device", "mount", "methods")
_FIELDS = {"name", "drive", "tenants", "layout", "offset_bytes", *_PATHS}


def load_config(path: Path) -> ServedDrives:
    """The drives that a YAML file lists; raises ValueError naming the file and what is off.

    `drive` is the name of a preset, a description file (relative to this one), or a description itself; left out, the
    paper's drive. docs/drives.md shows a whole file.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict) or not isinstance(values.get("drives"), list):
            raise ValueError("needs a list named drives, each with a name")
        if unknown := set(values) - {"drives", "restart"}:
            raise ValueError(f"{unknown.pop()}: no such field; there are drives and restart")
        restarts = bool(values.get("restart", True))
        return ServedDrives(tuple(_drive(entry, path.parent, restarts) for entry in values["drives"]))
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error


def _drive(entry: Any, folder: Path, restarts: bool) -> ServedDrive:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise ValueError(f"a drive needs a name, as in '- name: csd0': {entry!r}")
    if unknown := set(entry) - _FIELDS:
        fields = ", ".join(sorted(_FIELDS))
        raise ValueError(f"drive {entry['name']}: {unknown.pop()}: no such field; there are {fields}")
    paths = {key: folder / entry[key] for key in _PATHS if entry.get(key)}
    try:
        return ServedDrive(
            name=entry["name"],
            spec=_spec(entry.get("drive"), folder),
            tenants=tuple(entry.get("tenants", [DEFAULT])),
            layout=WindowLayout(**entry.get("layout", {})),
            offset_bytes=int(entry.get("offset_bytes", 0)),
            restarts=restarts,
            **paths,
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"drive {entry['name']}: {error}") from error


def _spec(value: Any, folder: Path) -> DriveSpec:
    if value is None:
        return INSTCSD_ZYNQ7045_8CH
    if isinstance(value, dict):
        spec = DriveSpec.from_dict(value)
        check_plausible(value)
        return spec
    return DRIVES[value] if value in DRIVES else load_drive(folder / str(value))
