"""A served drive without recovery, for redundant sets: other drives store the same data."""

from __future__ import annotations

import time
from concurrent.futures import Future
from contextlib import suppress

from csd_link.connect import Connect
from csd_spec import Command, Completion, Drive, DriveSpec

RECONNECT_S = 5.0  # time for a restarted drive to answer
_POLL_INTERVAL_S = 0.05


class PlainDrive:
    """A served drive. After it died, its commands complete with PATH_LOST; `reconnect` may reach it again."""

    def __init__(self, connect: Connect) -> None:
        """Attach to a drive; raises DriveLostError if it does not answer."""
        self._connect, self._device = connect, connect()
        self.name, self.spec, self.max_bytes = self._device.name, self._device.spec, self._device.max_bytes
        self.node: str = getattr(connect, "node", "")  # name of the machine, if known
        self._again: PlainDrive | None = None

    spec: DriveSpec

    def submit(self, command: Command, submit_ns: int) -> Future[Completion]:
        return self._device.submit(command, submit_ns)

    def reconnect(self) -> Drive | None:
        """Return the restarted drive, with or without its data; None if it runs, or is not back within RECONNECT_S."""
        if self._device.lost is None or not self._device.identity.restarts:
            return None
        self._device.close()
        deadline = time.monotonic() + RECONNECT_S
        while not self._again and time.monotonic() < deadline:
            try:
                self._again = PlainDrive(self._connect)
            except OSError:
                time.sleep(_POLL_INTERVAL_S)
        return self._again

    def close(self) -> None:
        with suppress(OSError):
            self._device.close()
        if self._again:
            self._again.close()
