"""Window transport: consecutive windows in a file, a block device or an NVMe character device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

from csd_link.connect import Connect, find_live_drive, open_window
from csd_link.diagnosis import MissingDependency
from csd_link.driveset import DriveSetConfig
from csd_link.host_end import DriveLostError
from csd_link.medium import FileMedium, make_window_file
from csd_link.private_server import ServerEndpoint, open_devices, own_drives
from csd_link.served_drive import ServedDrive
from csd_link.transports.transport import DriveFactory, Transport, check_served
from csd_link.window import BLOCK_BYTES
from csd_spec import Drive


class WindowPath(Transport):
    """Drives served at a path; on a new file, private drives of this run."""

    name, form = "window", "window:PATH (a file or block device)"

    def check(self, where: str) -> None:
        if not where:
            raise ValueError("transport = window: needs a path, as window:/dev/nvme0n1")

    def missing(self) -> MissingDependency | None:
        return None if hasattr(os, "O_DIRECT") else MissingDependency("this system has no O_DIRECT", "use Linux")

    def served(self, drives: DriveSetConfig) -> Sequence[Connect]:
        path = Path(drives.where)
        if not _is_served(path):
            return ()
        check_served(drives, str(path))
        return [partial(open_window, path, number) for number in range(drives.total)]

    def open(self, drives: DriveSetConfig, factory: DriveFactory) -> AbstractContextManager[list[Drive]]:
        connects = self.served(drives)
        if connects:
            return open_devices(connects, drives.recovery_s)
        return own_drives(drives, factory.server, partial(_on, Path(drives.where)))


def _on(path: Path, drive: ServedDrive, number: int, scratch: Path) -> ServerEndpoint:
    """Configure a drive with window `number` of a file."""
    size = drive.layout.blocks * BLOCK_BYTES
    make_window_file(path, (number + 1) * size)
    placed = replace(drive, device=path.absolute(), offset_bytes=number * size)
    return ServerEndpoint(placed, partial(open_window, path, number))


def _is_served(path: Path) -> bool:
    """Whether a drive answers at the path; raises DriveLostError for a device without one."""
    if not path.exists() or (path.is_file() and path.stat().st_size == 0):
        return False
    medium = FileMedium(path)
    try:
        if find_live_drive(medium):
            return True
        if not path.is_file():
            raise DriveLostError(
                f"no drive answers at {path}: serve one there first (vcsd drive serve --window-device {path})"
            )
        return False
    finally:
        medium.close()
