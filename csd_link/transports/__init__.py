"""Transports by name. To add one, write a module here and extend the table, or register an entry point of the group
`vcsd.transports`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from importlib.metadata import entry_points

from csd_link.driveset import DriveSetConfig
from csd_link.transports.fuse import Fuse
from csd_link.transports.inproc import InProcess
from csd_link.transports.nvme_node import NvmeNode
from csd_link.transports.nvme_tcp import NvmeTcp
from csd_link.transports.process import Process
from csd_link.transports.ray_fleet import RayFleet
from csd_link.transports.transport import DriveFactory, Transport
from csd_link.transports.window_path import WindowPath
from csd_spec import Drive

OURS: tuple[Transport, ...] = (InProcess(), Process(), Fuse(), WindowPath(), NvmeTcp(), NvmeNode(), RayFleet())
GROUP = "vcsd.transports"


@cache
def transports() -> dict[str, Transport]:
    """All installed transports by name."""
    plugged_in = [entry.load()() for entry in entry_points(group=GROUP)]
    return {transport.name: transport for transport in (*OURS, *plugged_in)}


def transport_of(drives: DriveSetConfig) -> Transport:
    """Return the transport of a set of drives; raises ValueError if it is unknown."""
    chosen = transports().get(drives.kind)
    if chosen is None:
        forms = ", ".join(transport.form for transport in transports().values())
        raise ValueError(f"transport = {drives.transport!r}: must be one of {forms}")
    chosen.check(drives.where)
    return chosen


def open_drives(drives: DriveSetConfig, factory: DriveFactory) -> AbstractContextManager[list[Drive]]:
    """Open drives for the duration of the block.

    Raises:
        ValueError: The transport is unknown.
        ConnectionError: No drive answers.
    """
    return transport_of(drives).open(drives, factory)
