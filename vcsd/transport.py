"""Drives by the table of transports, made of our firmware."""

from __future__ import annotations

import sys
from collections.abc import Collection
from contextlib import AbstractContextManager, closing
from functools import partial

from attention_engine import METHODS, load_methods
from csd_firmware import InProcessDevice
from csd_firmware.folder import DESCRIPTION, DriveFolder
from csd_link import transports
from csd_link.connect import Connect
from csd_link.driveset import DriveSet
from csd_link.transports.ray_fleet import RayFleet
from csd_link.transports.transport import DriveFactory, Make
from csd_spec import Attention, Device, LogPage
from vcsd.administer import read_log

TRANSPORT_HELP = f"way to the drives: {', '.join(each.form for each in transports.transports().values())}"


def _in_process(drives: DriveSet) -> Make:
    return partial(
        InProcessDevice,
        drives.spec,
        methods=load_methods(drives.methods),
        **drives.hosting_fields(drives.count),
    )


FACTORY = DriveFactory(_in_process, (sys.executable, "-m", "csd_firmware.process"))


def fleet_or_count(drives: int | str, transport: str) -> tuple[int, str]:
    """Number of drives and their transport; `ray` or `ray://HOST:PORT` in place of the number is all of a fleet's.

    Raises ValueError for a text that is neither or without Ray, DriveLostError where no fleet is up.
    """
    if isinstance(drives, int):
        return drives, transport
    name, _, where = drives.partition(":")
    found = transports.transports().get(name)
    if not isinstance(found, RayFleet):
        raise ValueError(f"drives = {drives!r}: must be a number, ray or ray://HOST:PORT")
    found.check(where)
    return found.count(where), drives


def open_drives(drives: DriveSet) -> AbstractContextManager[list[Device]]:
    """The drives until the block ends; see `csd_link.transports.open_drives`."""
    return transports.open_drives(drives, FACTORY)


def check_drives(drives: DriveSet) -> None:
    """Raise ValueError for drives that cannot be opened: the transport lacks something, or a folder holds another drive
    or is used by another process."""
    transport = transports.transport_of(drives)
    if missing := transport.missing():
        raise ValueError(f"transport = {drives.transport}: {missing.found}: {missing.fix}")
    if transport.served(drives):
        return
    for folder in drives.folders:
        if folder and (folder / DESCRIPTION).exists():
            DriveFolder(drives.spec, folder).close()


def methods_of(drives: DriveSet) -> list[str]:
    """Return the names of the methods that a set of drives knows; served drives are asked for theirs.

    Raises:
        ValueError: The transport is unknown, or a methods file fails.
        DriveLostError: Served drives do not answer.
    """
    served = transports.transport_of(drives).served(drives)
    known = [_programs(connect) for connect in served] or [list(load_methods(drives.methods))]
    return [name for name in known[0] if all(name in names for names in known)]


def _programs(connect: Connect) -> list[str]:
    with closing(connect()) as device:
        return [each["name"] for each in read_log(device, LogPage.PROGRAMS)["programs"]]


def check_method(what: Attention, known: Collection[str] | None) -> None:
    """Raise ValueError for a method that the drives do not know, or one of ours that a layout of theirs cannot serve.

    known: None where drives say themselves what they know; what a layout has, they say of others' methods at the first
    step.
    """
    method, layout = what.method, what.kv_layout
    if known is not None and method not in known:
        raise ValueError(f"attention = {method!r}: the drives know {', '.join(known)}")
    if not layout.attended:
        raise ValueError(f"layout = {layout.name!r}: is only read back and cannot be attended: use another layout")
    if method == "progressive" and not layout.coarse:
        raise ValueError(f"attention = {method!r}: layout {layout.name} has one precision, use layout progressive")
    if method in METHODS and method not in ("progressive", "dense") and not layout.keeps_rows:
        rows = "layout fp16" if layout.latent else f"{layout.name}-exact"
        raise ValueError(f"attention = {method!r}: layout {layout.name} keeps no rows, use {rows}")
