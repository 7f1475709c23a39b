"""What a host driver needs of a drive, however it is reached."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from csd_spec.commands import Command, Completion
from csd_spec.drive import DriveSpec
from csd_spec.status import Status


class DeviceError(Exception):
    """A drive refused a command or failed at it."""

    def __init__(self, drive: int | str, status: Status, reason: str) -> None:
        """drive: its number among a driver's, or its name."""
        super().__init__(f"drive {drive}: {status.name.lower().replace('_', ' ')}: {reason}")
        self.drive, self.status, self.reason = drive, status, reason


class Device(Protocol):
    """A drive that takes commands in order and answers each with a completion.

    A class may also have `carry_out`, with what `submit` takes, which returns the completion itself: a drive in this
    process then works in the thread that waits for it. And it may have `max_bytes`, the most payload, and the most
    data, of a command: what is larger it carries out in parts (`csd_link.cutting`).
    """

    @property
    def name(self) -> str:
        """What its administrator calls it."""
        ...

    @property
    def spec(self) -> DriveSpec: ...

    def submit(self, command: Command, submit_ns: int) -> Future[Completion]:
        """Queue a command that the host issues at `submit_ns` of modelled time."""
        ...

    def close(self) -> None:
        """Finish what is queued and release the drive."""
        ...
