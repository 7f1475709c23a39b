"""Configuration file of drives to serve."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import Discriminator, Field, Tag

from csd_io.paths import expand
from csd_link.hosting import HostingOptions
from csd_link.nvmeof.commands import MAX_NQN_BYTES
from csd_link.nvmeof.listen import AllowedHost
from csd_link.served_drive import DEFAULT, SHARED, ServedDrive, ServedDrives
from csd_link.window import MAX_DEPTH, MAX_SLOT_BLOCKS, WindowLayout
from csd_spec import DriveSpec
from csd_spec.checked import frozen_value
from csd_spec.presets import DRIVES, INSTCSD_ZYNQ7045_8CH
from nvmevirt_config.describe import load_drive
from nvmevirt_config.document import read_yaml

NameOrDescription = Annotated[
    Annotated[str, Tag("name")] | Annotated[DriveSpec, Tag("description")],
    Discriminator(lambda given: "name" if isinstance(given, str) else "description"),
]


@frozen_value
class WindowSize:
    """Size of a window (`csd_link.window.WindowLayout`).

    Attributes:
        depth: Commands in flight.
        slot_blocks: Blocks of 4 KiB for the data of one command; None: 8192, or 512 with several tenants.
    """

    depth: Annotated[int, Field(ge=1, le=MAX_DEPTH)] = WindowLayout().depth
    slot_blocks: Annotated[int, Field(ge=1, le=MAX_SLOT_BLOCKS)] | None = None


@frozen_value
class TenantEntry:
    """A tenant.

    Attributes:
        share: Fraction of the drive that it may use; None: an equal part of the rest.
    """

    share: Annotated[float, Field(gt=0, le=1)] | None = None


Tenants = Annotated[
    Annotated[tuple[str, ...], Tag("list")] | Annotated[dict[str, TenantEntry], Tag("shares")],
    Discriminator(lambda given: "shares" if isinstance(given, dict) else "list"),
]


@frozen_value
class DriveEntry(HostingOptions):
    """A drive to serve. Paths are relative to this file.

    Attributes:
        name: Name of the drive, for `vcsd log` and for hosts.
        drive: Preset, description file, or a description; None: the InstInfer paper's drive.
        path: Folder for its flash; None: memory.
        tenants: Names of tenants, each with a window; or a map from names to their shares.
        mount: Mount point; None: not mounted.
        methods_file: File with attention methods.
        layouts_file: File with layouts.
        device: File or device for its windows; None: shared memory.
        offset_bytes: Begin of the windows in `device`, bytes.
        layout: Size of each window.
    """

    name: str
    drive: NameOrDescription | None = None
    path: Path | None = None
    tenants: Tenants = (DEFAULT,)
    mount: Path | None = None
    methods_file: Path | None = None
    layouts_file: Path | None = None
    device: Path | None = None
    offset_bytes: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    layout: WindowSize = WindowSize()

    def served(self, folder: Path, restarts: bool) -> ServedDrive:
        """Convert to a drive configuration; paths are relative to `folder`."""
        path, mount, methods, layouts, device = (
            location and folder / expand(location)
            for location in (self.path, self.mount, self.methods_file, self.layouts_file, self.device)
        )
        default = SHARED if len(self.tenants) > 1 else WindowLayout()
        return ServedDrive(
            name=self.name,
            spec=resolve_spec(self.drive, folder),
            path=path,
            tenants=tuple(self.tenants),
            shares=self._shares(),
            layout=WindowLayout(depth=self.layout.depth, slot_blocks=self.layout.slot_blocks or default.slot_blocks),
            device=device,
            offset_bytes=self.offset_bytes,
            mount=mount,
            restarts=restarts,
            methods_file=methods,
            layouts_file=layouts,
            **self.overrides,
        )

    def _shares(self) -> tuple[float, ...]:
        """Fraction of each tenant; tenants without one get equal parts of the rest."""
        if not isinstance(self.tenants, dict) or all(tenant.share is None for tenant in self.tenants.values()):
            return ()
        shares = [tenant.share for tenant in self.tenants.values()]
        left = 1 - sum(share for share in shares if share is not None)
        return tuple(left / shares.count(None) if share is None else share for share in shares)


@frozen_value
class ServeFile:
    """Drives to serve.

    Attributes:
        drives: Drives, each with its own process.
        restart: Whether killed drives are restarted.
    """

    drives: tuple[DriveEntry, ...]
    restart: bool = True


@frozen_value
class HostsFile:
    """NVMe hosts that may connect: NQN and tenant of each."""

    hosts: dict[str, str]


def load_hosts(path: Path) -> tuple[AllowedHost, ...]:
    """Load the hosts in a YAML file; raises ValueError with the file and the invalid field."""
    hosts = read_yaml(path, HostsFile).hosts
    if not hosts:
        raise ValueError(f"{path}: hosts: is empty, so that no host could connect: add NQN: TENANT")
    for nqn, tenant in hosts.items():
        if not nqn.startswith("nqn.") or len(nqn.encode()) > MAX_NQN_BYTES:
            raise ValueError(
                f"{path}: hosts: {nqn!r} must be an NVMe qualified name (nqn. ...) of at most {MAX_NQN_BYTES} bytes"
                " (on Linux: /etc/nvme/hostnqn)"
            )
        if not tenant:
            raise ValueError(f"{path}: hosts: {nqn}: has no tenant: add its name")
    return tuple(AllowedHost(nqn, tenant) for nqn, tenant in hosts.items())


def load_config(path: Path) -> ServedDrives:
    """Load the drives in a YAML file; raises ValueError with the file and the invalid field.

    docs/drives.md has a complete example.
    """
    file = read_yaml(path, ServeFile)
    try:
        return ServedDrives(tuple(entry.served(path.parent, file.restart) for entry in file.drives))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def check_files(drives: Iterable[ServedDrive]) -> None:
    """Raise ValueError for a path of a drive that cannot be used: a missing file, or a file instead of a folder."""
    for drive in drives:
        for name in ("methods_file", "layouts_file"):
            file = getattr(drive, name)
            if file and not file.is_file():
                raise ValueError(f"{drive.name}: {name}: {file}: no such file")
        for name in ("path", "mount"):
            folder = getattr(drive, name)
            if folder and os.path.lexists(folder) and not os.path.isdir(folder) and not os.path.ismount(folder):
                raise ValueError(f"{drive.name}: {name}: {folder}: is not a folder")


def resolve_spec(drive: str | DriveSpec | None, folder: Path) -> DriveSpec:
    """Return a drive by preset, description file in `folder`, or description; raises ValueError for other names."""
    if not isinstance(drive, str):
        return drive or INSTCSD_ZYNQ7045_8CH
    file = folder / expand(Path(drive))
    if drive not in DRIVES and not file.is_file():
        raise ValueError(f"drive = {drive!r}: neither a file nor a preset ({', '.join(DRIVES)})")
    return DRIVES[drive] if drive in DRIVES else load_drive(file)
