"""Configuration of drives with their own process: description, tenants, addresses."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from csd_link.hosting import HostingOptions
from csd_link.nvmeof.listen import Listen
from csd_link.window import BLOCK_BYTES, WindowLayout
from csd_spec.checked import frozen_value
from csd_spec.drive import DriveSpec

DEFAULT = "default"  # tenant of drives that configure none
SHARED = WindowLayout(slot_blocks=512)  # default with several tenants: a smaller slot keeps waits of the others short
ADMIN = "_admin"  # built-in tenant without sequences, which reads logs
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PATHS = ("path", "device", "mount", "methods_file", "layouts_file")


@frozen_value
class ServedDrive(HostingOptions):
    """A drive to serve. The remaining fields are those of `csd_link.hosting.HostingOptions`.

    Attributes:
        path: Folder of its flash; None keeps it in memory.
        tenants: Names of tenants.
        shares: Fraction of the drive that each tenant may use, above 0, with a sum of at most 1; empty for equal ones.
        device, offset_bytes: File or memory device that holds its windows, one per tenant, for a host behind a block
            device; None uses shared memory.
        mount: Folder to mount it on.
        restarts: Whether it is restarted when it is killed.
        methods_file, layouts_file: Python files with the operator's attention methods and KV layouts.
        listen: Address for NVMe/TCP hosts; None does not listen.
    """

    name: str
    spec: DriveSpec
    path: Path | None = None
    tenants: tuple[str, ...] = (DEFAULT,)
    shares: tuple[float, ...] = ()
    layout: WindowLayout = WindowLayout()
    device: Path | None = None
    offset_bytes: int = 0
    mount: Path | None = None
    restarts: bool = True
    methods_file: Path | None = None
    layouts_file: Path | None = None
    listen: Listen | None = None

    def __post_init__(self) -> None:
        for name in (self.name, *self.tenants):
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"name {name!r}: letters, digits, '.', '_' and '-', at most 64, a letter or digit first"
                )
        if not self.tenants or len(set(self.tenants)) != len(self.tenants):
            raise ValueError(f"{self.name}: tenants {', '.join(self.tenants)}: at least one is needed, each once")
        if self.shares:
            if len(self.shares) != len(self.tenants):
                raise ValueError(f"{self.name}: {len(self.shares)} shares of {len(self.tenants)} tenants")
            if min(self.shares) <= 0 or sum(self.shares) > 1 + 1e-9:
                said = ", ".join(f"{share:g}" for share in self.shares)
                raise ValueError(f"{self.name}: tenants' shares {said}: each must be above 0, their sum at most 1")
        for host in (self.listen and self.listen.hosts) or ():
            if host.tenant and host.tenant not in self.tenants:
                raise ValueError(
                    f"{self.name}: host {host.nqn} is tenant {host.tenant!r}: this drive has {', '.join(self.tenants)}"
                )
        self._check(self.path)

    def share_of(self, tenant: str) -> float:
        """Fraction of the drive that a tenant may use; 1 for the administrator, which has no sequences."""
        if tenant == ADMIN:
            return 1.0
        return self.shares[self.tenants.index(tenant)] if self.shares else 1 / len(self.tenants)

    def to_dict(self) -> dict[str, Any]:
        """Return its fields in a form that JSON supports."""
        return asdict(self) | {name: str(path) for name in _PATHS if (path := getattr(self, name))}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ServedDrive:
        """Read the output of `to_dict`."""
        paths = {name: Path(values[name]) for name in _PATHS if values[name]}
        nested = {
            "spec": DriveSpec.from_dict(values["spec"]),
            "layout": WindowLayout(**values["layout"]),
            "tenants": tuple(values["tenants"]),
            "shares": tuple(values["shares"]),
            "listen": values["listen"] and Listen.from_dict(values["listen"]),
        }
        return cls(**values | paths | nested)


def is_within(path: Path, folder: Path) -> bool:
    """Whether a path is a folder or inside of it, for the file system: links and other spellings count."""
    resolved, outer = os.path.realpath(path), os.path.realpath(folder)
    return resolved == outer or resolved.startswith(f"{outer.rstrip('/')}/")


def _check_apart(first: ServedDrive, second: ServedDrive) -> None:
    """Raise ValueError if two drives have a folder or a part of a device in common."""
    for one, other in ((first, second), (second, first)):
        for name, path, folder in (
            ("mount", one.mount, other.mount),
            ("path", one.path, other.path),
            ("path", one.path, other.mount),
        ):
            if path and folder and is_within(path, folder):
                raise ValueError(
                    f"drives {one.name} and {other.name}: {name} {path} is inside of {folder}: give each drive its own"
                )
    if first.device and second.device and os.path.realpath(first.device) == os.path.realpath(second.device):
        ends = [
            drive.offset_bytes + len(drive.tenants) * drive.layout.blocks * BLOCK_BYTES for drive in (first, second)
        ]
        if first.offset_bytes < ends[1] and second.offset_bytes < ends[0]:
            raise ValueError(
                f"drives {first.name} and {second.name}: their windows in {first.device} overlap: a window of"
                f" {first.name} ends at {ends[0]:,}, of {second.name} at {ends[1]:,}; change offset_bytes"
            )


@dataclass(frozen=True, slots=True)
class ServedDrives:
    """Drives of one server process."""

    drives: tuple[ServedDrive, ...]

    def __post_init__(self) -> None:
        names = [drive.name for drive in self.drives]
        twice = {name for name in names if names.count(name) > 1}
        if not names or twice:
            raise ValueError(f"drives: {'name ' + twice.pop() + ' is given twice' if twice else 'there is none'}")
        for first, second in combinations(self.drives, 2):
            _check_apart(first, second)
        for drive in self.drives:
            if drive.path and drive.mount and is_within(drive.path, drive.mount):
                raise ValueError(f"{drive.name}: mount {drive.mount}: hides the folder of its flash, {drive.path}")

    def to_json(self) -> str:
        return json.dumps({"drives": [drive.to_dict() for drive in self.drives]})

    @classmethod
    def from_json(cls, text: str) -> ServedDrives:
        """Read the output of `to_json`."""
        return cls(tuple(map(ServedDrive.from_dict, json.loads(text)["drives"])))
