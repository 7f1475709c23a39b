"""Drive interface as seen by the host driver, independent of the transport."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from csd_spec.commands import Command, Completion
from csd_spec.drive import DriveSpec
from csd_spec.status import Status


class DriveError(Exception):
    """A drive rejected a command or failed while carrying it out."""

    def __init__(self, drive: int | str, status: Status, reason: str) -> None:
        """`drive` is the drive's index in the host driver, or its name."""
        super().__init__(f"drive {drive}: {status.name.lower().replace('_', ' ')}: {reason}")
        self.drive, self.status, self.reason = drive, status, reason


class Drive(Protocol):
    """A drive that takes commands in order and answers each with a completion.

    A class may also have `carry_out`, with the arguments of `submit`, which returns the completion itself: a drive in
    this process then works in the calling thread. It may also have `max_bytes`, the limit on the payload and on the
    data of a command; larger commands are carried out in parts (`csd_link.splitting`).
    """

    @property
    def name(self) -> str:
        """Name given by the administrator."""
        ...

    @property
    def spec(self) -> DriveSpec: ...

    def submit(self, command: Command, submit_ns: int) -> Future[Completion]:
        """Queue a command that the host issues at simulated time `submit_ns`, ns."""
        ...

    def close(self) -> None:
        """Finish queued commands and release the drive."""
        ...
