"""In-process transport: drives in this process, without setup."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from csd_link.driveset import DriveSetConfig
from csd_link.transports.transport import DriveFactory, Transport
from csd_spec import Drive


class InProcess(Transport):
    """Runs the firmware in the calling process."""

    name = form = "inproc"

    @contextmanager
    def open(self, drives: DriveSetConfig, factory: DriveFactory) -> Iterator[list[Drive]]:
        make, devices = factory.in_process(drives), list[Drive]()
        with ExitStack() as undo:
            for folder in drives.folders:
                devices.append(make(folder))
                undo.callback(devices[-1].close)
            yield devices
