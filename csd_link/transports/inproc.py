"""Drives in this process: nothing to set up, nothing between."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from csd_link.driveset import DriveSet
from csd_link.finding import Missing
from csd_link.transports.transport import DriveFactory, Transport
from csd_spec import Device


class InProcess(Transport):
    """The firmware runs in the program's own process."""

    name = form = "inproc"

    def missing(self) -> Missing | None:
        return None if importlib.util.find_spec("numba") else Missing("numba is missing", "pip install numba")

    @contextmanager
    def open(self, drives: DriveSet, factory: DriveFactory) -> Iterator[list[Device]]:
        make, devices = factory.in_process(drives), list[Device]()
        with ExitStack() as undo:
            for folder in drives.folders:
                devices.append(make(folder))
                undo.callback(devices[-1].close)
            yield devices
