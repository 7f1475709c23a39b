"""FUSE transport: each drive is mount_endpoint as a folder that contains its window."""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

from csd_link.connect import open_window
from csd_link.diagnosis import MissingDependency
from csd_link.driveset import DriveSetConfig
from csd_link.private_server import ServerEndpoint, own_drives
from csd_link.served_drive import ServedDrive
from csd_link.transports.transport import DriveFactory, Transport
from csd_spec import Drive
from csd_spec.optional import is_installed


class Fuse(Transport):
    """Private drives of this run, each mounted by its own process."""

    name = form = "fuse"

    def missing(self) -> MissingDependency | None:
        if not shutil.which("fusermount3"):
            return MissingDependency("fusermount3 is missing", "apt-get install fuse3")
        if not is_installed("pyfuse3"):
            fix = "apt-get install fuse3 libfuse3-dev pkg-config, then pip install 'vcsd[fuse]'"
            return MissingDependency("pyfuse3 is missing", fix)
        if not os.path.exists("/dev/fuse"):
            return MissingDependency("/dev/fuse is missing", "modprobe fuse")
        usable = os.access("/dev/fuse", os.R_OK | os.W_OK)
        return None if usable else MissingDependency("/dev/fuse is not accessible to this user", "chmod 666 /dev/fuse")

    def open(self, drives: DriveSetConfig, factory: DriveFactory) -> AbstractContextManager[list[Drive]]:
        return own_drives(drives, factory.server, mount_endpoint)


def mount_endpoint(drive: ServedDrive, number: int, scratch: Path) -> ServerEndpoint:
    """Configure a drive to be mounted in the run's temporary folder."""
    mount = scratch / f"mount{number}"
    mount.mkdir(mode=0o700)
    return ServerEndpoint(replace(drive, mount=mount), partial(open_window, mount / "window"))
