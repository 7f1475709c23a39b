"""Process transport: one process per drive, windows in shared memory, Unix sockets as doorbells."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from csd_link.connect import connect
from csd_link.diagnosis import MissingDependency
from csd_link.driveset import DriveSetConfig
from csd_link.private_server import ServerEndpoint, own_drives
from csd_link.run_dir import private_dir, run_dir, window_path
from csd_link.served_drive import ServedDrive
from csd_link.transports.transport import DriveFactory, Transport
from csd_spec import Drive

MIN_BYTES = 256 << 20  # shared memory that a few windows use


class Process(Transport):
    """Private drives of this run, each with its own process."""

    name = form = "process"

    def missing(self) -> MissingDependency | None:
        try:
            folder = private_dir(run_dir())
        except OSError as error:
            return MissingDependency(str(error), "export VCSD_RUN_DIR=FOLDER, one of your own in memory")
        free = shutil.disk_usage(folder).free
        if free < MIN_BYTES:
            return MissingDependency(
                f"{free >> 20} MiB are free at {folder}", "export VCSD_RUN_DIR=FOLDER, where more is free"
            )
        return None

    def open(self, drives: DriveSetConfig, factory: DriveFactory) -> AbstractContextManager[list[Drive]]:
        return own_drives(drives, factory.server, in_shared_memory)


def in_shared_memory(drive: ServedDrive, number: int, scratch: Path) -> ServerEndpoint:
    """Configure a drive with its window in the run folder."""
    return ServerEndpoint(drive, partial(connect, window_path(drive.name)))
