"""Run folder: files in shared memory through which this user's served drives and hosts meet."""

from __future__ import annotations

import os
from pathlib import Path

from csd_link.served_drive import DEFAULT


def run_dir() -> Path:
    """Run folder of this user's drives: $VCSD_RUN_DIR, or a folder in /dev/shm."""
    return Path(os.environ.get("VCSD_RUN_DIR") or f"/dev/shm/vcsd-{os.getuid()}")


def drive_dir(name: str) -> Path:
    """Folder with the windows and doorbells of a served drive."""
    return run_dir() / name


def window_path(name: str, tenant: str = DEFAULT) -> Path:
    """A tenant's window in shared memory."""
    return drive_dir(name) / f"window-{tenant}"


def doorbell_path(window: Path) -> Path:
    """Socket of a window in shared memory; hosts of all versions look for this suffix."""
    return window.with_name(f"{window.name}.bell")


def pid_path(name: str) -> Path:
    """File with the PID of a served drive's process."""
    return drive_dir(name) / "pid"


def port_path(name: str) -> Path:
    """File with the TCP port at which a served drive listens for NVMe hosts."""
    return drive_dir(name) / "nvme-tcp-port"


def private_dir(path: Path) -> Path:
    """Create a folder that only its owner can access; raises PermissionError if another user owns or can access it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{path}: must be a folder that only you own and can access: chmod 700 it")
    return path
