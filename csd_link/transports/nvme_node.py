"""NVMe node transport: drives that Linux's NVMe driver is connected to, through namespace character devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from csd_link.connect import Connect
from csd_link.diagnosis import MissingDependency
from csd_link.driveset import DriveSetConfig
from csd_link.nvmeof.node import NodeDrive
from csd_link.private_server import open_devices
from csd_link.transports.transport import DriveFactory, Transport, check_served
from csd_spec import Drive

_NODES = Path("/dev")


class NvmeNode(Transport):
    """Drives through character devices of Linux's NVMe driver, one per drive."""

    name, form = "nvme", "nvme:/dev/ngXnY (several drives: with commas)"

    def check(self, where: str) -> None:
        paths = where.split(",")
        if not all(paths) or len(set(paths)) < len(paths):
            raise ValueError(f"transport = nvme:{where}: needs a device for each drive, as nvme:/dev/ng0n3,/dev/ng1n3")

    def missing(self) -> MissingDependency | None:
        if any(os.access(path, os.R_OK | os.W_OK) for path in _NODES.glob("ng*")):
            return None
        return MissingDependency(
            "no /dev/ngXnY that this user may use", "as root: modprobe nvme-tcp, then nvme connect -t tcp"
        )

    def served(self, drives: DriveSetConfig) -> Sequence[Connect]:
        paths = [Path(path) for path in drives.where.split(",")]
        if len(paths) != drives.total:
            raise ValueError(f"transport = nvme:{drives.where}: {len(paths)} devices for {drives.total} drives")
        check_served(drives, drives.where)
        return [partial(NodeDrive, path) for path in paths]

    def open(self, drives: DriveSetConfig, factory: DriveFactory) -> AbstractContextManager[list[Drive]]:
        return open_devices(self.served(drives), drives.recovery_s)
