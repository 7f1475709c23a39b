"""Checks the requirements of each transport, with the command that fixes a missing one."""

from __future__ import annotations

import shutil

from csd_link.diagnosis import Finding, MissingDependency
from csd_link.transports import transports
from nvmevirt_config.guest import MAKE_FS, QEMU, find_kernel
from nvmevirt_config.module import Reservation, check


def examine() -> list[Finding]:
    """One finding for each transport, and for both methods through the Linux NVMe driver (guest VM, NVMeVirt)."""
    lacks = {name: transport.missing() for name, transport in transports().items()}
    lacks |= {"guest": _guest(), "nvmevirt": _nvmevirt()}
    return [
        Finding(name, False, lack.found, lack.fix) if lack else Finding(name, True, "ready")
        for name, lack in lacks.items()
    ]


def _guest() -> MissingDependency | None:
    if not shutil.which(QEMU):
        return MissingDependency(f"{QEMU} is missing", "apt-get install qemu-system-x86")
    if not shutil.which(MAKE_FS):
        return MissingDependency(f"{MAKE_FS} is missing", "apt-get install e2fsprogs")
    try:
        find_kernel()
    except FileNotFoundError as error:
        return MissingDependency("no kernel for the guest VM", str(error).partition(": ")[2])
    return None


def _nvmevirt() -> MissingDependency | None:
    lacks = [finding for finding in check(Reservation()) if not finding.ok]
    return MissingDependency(f"{lacks[0].what}: no ({lacks[0].found})", lacks[0].fix) if lacks else None
