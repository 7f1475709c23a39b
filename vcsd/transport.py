"""Drives by the table of transports, made of our firmware."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from functools import partial

from csd_firmware import InProcessDevice
from csd_link import transports
from csd_link.driveset import DriveSet
from csd_link.transports.transport import DriveFactory, Make
from csd_spec import Device

TRANSPORT_HELP = f"way to the drives: {', '.join(each.form for each in transports.transports().values())}"


def _in_process(drives: DriveSet) -> Make:
    return partial(InProcessDevice, drives.spec)


FACTORY = DriveFactory(_in_process, (sys.executable, "-m", "csd_firmware.process"))


def open_drives(drives: DriveSet) -> AbstractContextManager[list[Device]]:
    """The drives until the block ends; see `csd_link.transports.open_drives`."""
    return transports.open_drives(drives, FACTORY)


def check_transport(drives: DriveSet) -> None:
    """Raise ValueError for a transport that there is none of."""
    transports.transport_of(drives)
