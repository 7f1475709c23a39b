"""Where served drives of this user meet their hosts: run folders in shared memory, and the files in them."""

from __future__ import annotations

import os
from pathlib import Path

from csd_link.served_drive import DEFAULT


def run_dir() -> Path:
    """Shared memory of this user's drives: $VCSD_RUN_DIR, or a folder in /dev/shm."""
    return Path(os.environ.get("VCSD_RUN_DIR") or f"/dev/shm/vcsd-{os.getuid()}")


def drive_dir(name: str) -> Path:
    """Where a drive's windows and doorbells are while it is served."""
    return run_dir() / name


def window_path(name: str, tenant: str = DEFAULT) -> Path:
    """A tenant's window, where it lies in shared memory."""
    return drive_dir(name) / f"window-{tenant}"


def doorbell_path(window: Path) -> Path:
    """The socket beside a window in shared memory; its suffix is what hosts of any age look for."""
    return window.with_name(f"{window.name}.bell")


def pid_path(name: str) -> Path:
    """What holds the number of a served drive's process."""
    return drive_dir(name) / "pid"


def port_path(name: str) -> Path:
    """File with the TCP port at which a served drive listens for NVMe hosts."""
    return drive_dir(name) / "nvme-tcp-port"


def private_dir(path: Path) -> Path:
    """A folder that is its owner's only; raises PermissionError for one that is another's, or open to others."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{path}: must be a folder that belongs to you and to nobody else: chmod 700 it")
    return path
