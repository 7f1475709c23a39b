"""A drive that is served: its description, where its flash lies, who may use it, how it is reached."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from csd_link.window import WindowLayout
from csd_spec.drive import DriveSpec

ADMIN = "_admin"  # a tenant that every drive has, with no sequences: it reads logs
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedDrive:
    """path: a folder with its flash; None is memory. mount: a folder to mount it on.

    device, offset_bytes: a file or memory device in which its window lies for a host behind a block device; None is
    shared memory. With several tenants their windows follow each other. restarts: whether it is begun again when it is
    killed.
    """

    name: str
    spec: DriveSpec
    path: Path | None = None
    tenants: tuple[str, ...] = ("default",)
    layout: WindowLayout = WindowLayout()
    device: Path | None = None
    offset_bytes: int = 0
    mount: Path | None = None
    restarts: bool = True

    def __post_init__(self) -> None:
        for name in (self.name, *self.tenants):
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"name {name!r}: letters, digits, '.', '_' and '-', at most 64, a letter or digit first"
                )
        if not self.tenants or len(set(self.tenants)) != len(self.tenants):
            raise ValueError(f"{self.name}: tenants {', '.join(self.tenants)}: at least one, and each once")

    @property
    def run_dir(self) -> Path:
        """Where its windows and sockets are while it is served."""
        return run_dir() / self.name


def run_dir() -> Path:
    """Shared memory of this user's drives: $VCSD_RUN_DIR, or a folder in /dev/shm."""
    return Path(os.environ.get("VCSD_RUN_DIR") or f"/dev/shm/vcsd-{os.getuid()}")


def window_name(tenant: str) -> str:
    """File of a tenant's window in a drive's run folder; its socket has `.bell` behind."""
    return f"window-{tenant}"


def private_dir(path: Path) -> Path:
    """A folder that is its owner's only; raises PermissionError for one that is another's, or open to others."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{path}: must be a folder that belongs to you and to nobody else: chmod 700 it")
    return path
