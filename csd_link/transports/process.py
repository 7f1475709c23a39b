"""A process for each drive, windows in shared memory, a Unix socket as doorbell."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from csd_link.connect import connect
from csd_link.driveset import DriveSet
from csd_link.finding import Missing
from csd_link.own_server import Placed, own_drives
from csd_link.run_dir import private_dir, run_dir, window_path
from csd_link.served_drive import ServedDrive
from csd_link.transports.transport import DriveFactory, Transport
from csd_spec import Device

MIN_BYTES = 256 << 20  # of shared memory: what a few windows in use take


class Process(Transport):
    """Drives of this run's own, each with a process."""

    name = form = "process"

    def missing(self) -> Missing | None:
        try:
            folder = private_dir(run_dir())
        except OSError as error:
            return Missing(str(error), "export VCSD_RUN_DIR=FOLDER, one of your own in memory")
        free = shutil.disk_usage(folder).free
        if free < MIN_BYTES:
            return Missing(f"{free >> 20} MiB are free at {folder}", "export VCSD_RUN_DIR=FOLDER, where more is free")
        return None

    def open(self, drives: DriveSet, factory: DriveFactory) -> AbstractContextManager[list[Device]]:
        return own_drives(drives, factory.server, in_shared_memory)


def in_shared_memory(drive: ServedDrive, number: int, scratch: Path) -> Placed:
    """A drive whose window lies where every served drive's does."""
    return Placed(drive, partial(connect, window_path(drive.name)))
