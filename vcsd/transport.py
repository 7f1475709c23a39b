"""Drives on any transport, with this package's firmware."""

from __future__ import annotations

import sys
from collections.abc import Collection
from contextlib import AbstractContextManager, closing
from functools import partial

from attention_engine import METHODS, load_methods
from csd_firmware import InProcessDrive
from csd_firmware.folder import DESCRIPTION, DriveFolder
from csd_link import transports
from csd_link.connect import Connect
from csd_link.driveset import DriveSetConfig
from csd_link.transports.ray_fleet import RayFleet
from csd_link.transports.transport import DriveFactory, Make
from csd_spec import AttentionConfig, Drive, LogPage
from vcsd.administer import read_log


def _in_process(drives: DriveSetConfig) -> Make:
    return partial(
        InProcessDrive,
        drives.spec,
        methods=load_methods(drives.methods_file),
        durability=drives.durability or "process",
        medium=drives.storage,
        threads=drives.hosting_fields(drives.count)["threads"],
    )


FACTORY = DriveFactory(_in_process, (sys.executable, "-m", "csd_firmware.process"))


def fleet_or_count(drives: int | str, transport: str) -> tuple[int, str]:
    """Number of drives and their transport; `ray` or `ray://HOST:PORT` stands for all drives of a fleet.

    Raises:
        ValueError: Another text, or Ray is not installed.
        DriveLostError: No fleet is up.
    """
    if isinstance(drives, int):
        return drives, transport
    name, _, where = drives.partition(":")
    fleet = transports.transports().get(name)
    if not isinstance(fleet, RayFleet):
        raise ValueError(f"drives = {drives!r}: must be a number, ray or ray://HOST:PORT")
    fleet.check(where)
    return fleet.count(where), drives


def open_drives(drives: DriveSetConfig) -> AbstractContextManager[list[Drive]]:
    """Open the drives until the block ends; see `csd_link.transports.open_drives`."""
    return transports.open_drives(drives, FACTORY)


def check_drives(drives: DriveSetConfig) -> None:
    """Raise ValueError if drives cannot be opened.

    The transport may lack something on this machine; a folder may be in use or hold another drive.
    """
    transport = transports.transport_of(drives)
    if missing := transport.missing():
        raise ValueError(f"transport = {drives.transport}: {missing.found}: {missing.fix}")
    if transport.served(drives):
        return
    for folder in drives.folders:
        if folder and (folder / DESCRIPTION).exists():
            DriveFolder(drives.spec, folder).close()


def methods_of(drives: DriveSetConfig) -> list[str]:
    """Names of the methods that all drives of a set know; served drives are asked.

    Raises:
        ValueError: The transport is unknown, or a methods file fails.
        DriveLostError: A served drive does not answer.
    """
    served = transports.transport_of(drives).served(drives)
    methods = [_programs(connect) for connect in served] or [list(load_methods(drives.methods_file))]
    return [name for name in methods[0] if all(name in names for names in methods)]


def _programs(connect: Connect) -> list[str]:
    with closing(connect()) as device:
        return [program["name"] for program in read_log(device, LogPage.PROGRAMS)["programs"]]


def check_method(what: AttentionConfig, methods: Collection[str] | None) -> None:
    """Raise ValueError for a method that the drives do not know, or a built-in one that their layout does not support.

    Args:
        what: Method and layout.
        methods: Methods of the drives; None if unknown: then the drives refuse unknown methods, and those that do not
            support the layout, at the first step.
    """
    method, layout = what.method, what.kv_layout
    if methods is not None and method not in methods:
        raise ValueError(f"method = {method!r}: the drives know {', '.join(methods)}")
    if not layout.attended:
        raise ValueError(f"layout = {layout.name!r}: cannot be attended, only read back: use another layout")
    if method == "progressive" and not layout.coarse:
        raise ValueError(f"method = {method!r}: layout {layout.name} has one precision, use layout progressive")
    if method in METHODS and method not in ("progressive", "dense") and not layout.keeps_rows:
        rows = "layout fp16" if layout.latent else f"{layout.name}-exact"
        raise ValueError(f"method = {method!r}: layout {layout.name} keeps no rows, use {rows}")
