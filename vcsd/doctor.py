"""Which ways to a drive are ready on this machine, and what mends those that are not."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable

from csd_link.serving import private_dir, run_dir
from nvmevirt_config.guest import MAKE_FS, QEMU, find_kernel
from nvmevirt_config.module import Finding, Reservation, check

LEAST_BYTES = 256 << 20  # of shared memory: what a few windows in use take


def examine() -> list[Finding]:
    """One finding for each way in."""
    return [_way(name, look) for name, look in WAYS.items()]


def _way(name: str, look: Callable[[], tuple[str, str] | None]) -> Finding:
    missing = look()
    return Finding(name, missing is None, *(missing or ("ready",)))


def _in_process() -> tuple[str, str] | None:
    return None if importlib.util.find_spec("numba") else ("numba is missing", "./dev setup")


def _process() -> tuple[str, str] | None:
    try:
        folder = private_dir(run_dir())
    except OSError as error:
        return str(error), "export VCSD_RUN_DIR=FOLDER, one of your own in memory"
    free = shutil.disk_usage(folder).free
    if free < LEAST_BYTES:
        return f"{free >> 20} MiB are free at {folder}", "export VCSD_RUN_DIR=FOLDER, where more is free"
    return None


def _fuse() -> tuple[str, str] | None:
    if not shutil.which("fusermount3"):
        return "fusermount3 is missing", "apt-get install fuse3"
    if importlib.util.find_spec("pyfuse3") is None:
        return "pyfuse3 is missing", "apt-get install fuse3 libfuse3-dev pkg-config, then ./dev setup"
    if not os.path.exists("/dev/fuse"):
        return "/dev/fuse is missing", "modprobe fuse"
    return None if os.access("/dev/fuse", os.R_OK | os.W_OK) else ("/dev/fuse is not for you", "chmod 666 /dev/fuse")


def _window() -> tuple[str, str] | None:
    return None if hasattr(os, "O_DIRECT") else ("this system has no O_DIRECT", "use Linux")


def _guest() -> tuple[str, str] | None:
    if not shutil.which(QEMU):
        return f"{QEMU} is missing", "apt-get install qemu-system-x86"
    if not shutil.which(MAKE_FS):
        return f"{MAKE_FS} is missing", "apt-get install e2fsprogs"
    try:
        find_kernel()
    except FileNotFoundError as error:
        return "there is no kernel for it", str(error).partition(": ")[2]
    return None


def _nvmevirt() -> tuple[str, str] | None:
    for finding in check(Reservation()):
        if not finding.ok:
            return f"{finding.what}: no ({finding.says})", finding.mend
    return None


WAYS: dict[str, Callable[[], tuple[str, str] | None]] = {
    "inproc": _in_process,
    "process": _process,
    "fuse": _fuse,
    "window": _window,
    "guest": _guest,
    "nvmevirt": _nvmevirt,
}
