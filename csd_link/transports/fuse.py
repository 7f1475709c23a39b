"""Mounted drives: each is a folder of files, its window one of them."""

from __future__ import annotations

import importlib.util
import os
import shutil
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

from csd_link.connect import open_window
from csd_link.driveset import DriveSet
from csd_link.finding import Missing
from csd_link.own_server import Placed, own_drives
from csd_link.served_drive import ServedDrive
from csd_link.transports.transport import DriveFactory, Transport
from csd_spec import Device


class Fuse(Transport):
    """Drives of this run's own, each with a process that mounts it."""

    name = form = "fuse"

    def missing(self) -> Missing | None:
        if not shutil.which("fusermount3"):
            return Missing("fusermount3 is missing", "apt-get install fuse3")
        if importlib.util.find_spec("pyfuse3") is None:
            fix = "apt-get install fuse3 libfuse3-dev pkg-config, then pip install pyfuse3"
            return Missing("pyfuse3 is missing", fix)
        if not os.path.exists("/dev/fuse"):
            return Missing("/dev/fuse is missing", "modprobe fuse")
        usable = os.access("/dev/fuse", os.R_OK | os.W_OK)
        return None if usable else Missing("/dev/fuse is not for you", "chmod 666 /dev/fuse")

    def open(self, drives: DriveSet, factory: DriveFactory) -> AbstractContextManager[list[Device]]:
        return own_drives(drives, factory.server, mounted)


def mounted(drive: ServedDrive, number: int, scratch: Path) -> Placed:
    """A drive that is mounted in a folder of the run's."""
    mount = scratch / f"mount{number}"
    mount.mkdir(mode=0o700)
    return Placed(replace(drive, mount=mount), partial(open_window, mount / "window"))
