"""Transport interface: one small class per transport, one instance in the table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from csd_link.connect import Connect
from csd_link.diagnosis import MissingDependency
from csd_link.driveset import DriveSetConfig
from csd_spec import Drive

Make = Callable[[Path | None], Drive]


@dataclass(frozen=True, slots=True)
class DriveFactory:
    """Creates drives. The link layer does not depend on the firmware, so the caller that opens drives passes this in.

    Attributes:
        in_process: Returns, for a set of drives, a function that creates one of them on a folder (None: in memory).
        server: Command that serves the drives in a file (`ServedDrives.to_json`); the file is its last argument.
    """

    in_process: Callable[[DriveSetConfig], Make]
    server: tuple[str, ...]


def check_served(drives: DriveSetConfig, where: str) -> None:
    """Raise ValueError for options that cannot apply to drives that are already served; `where` is for messages."""
    if drives.methods_file:
        raise ValueError(
            f"methods = {drives.methods_file}: the drives at {where} are already served, and use the methods that their"
            f" operator has loaded (vcsd drive serve --methods-file)"
        )
    if drives.overrides:
        raise ValueError(
            f"durability, medium and threads of the drives at {where} are set by their operator"
            f" (vcsd drive serve --durability, --medium, --threads)"
        )


class Transport(ABC):
    """A transport. A new one is a module with a subclass, and a line in the table or an entry point.

    Attributes:
        name: Name, the first part of the option.
        form: Syntax for users.
    """

    name: str
    form: str

    def check(self, where: str) -> None:
        """Raise ValueError for an invalid text after the name and colon."""
        if where:
            raise ValueError(f"transport = {self.name}:{where}: {self.name} takes no argument")

    def missing(self) -> MissingDependency | None:
        """Return the requirement that this machine lacks; None if it has all."""
        return None

    def served(self, drives: DriveSetConfig) -> Sequence[Connect]:
        """Return how to reach drives that are already served; empty if `open` creates the drives."""
        return ()

    def more(self, drives: DriveSetConfig, names: Collection[str]) -> Connect | None:
        """Return how to reach a drive that may replace a lost one; None if there is none.

        Args:
            names: Names of drives in use.
        """
        return None

    def draining(self, drives: DriveSetConfig) -> Collection[str] | None:
        """Names of drives whose data hosts should move away; None if the transport does not support this."""
        return None

    @abstractmethod
    def open(self, drives: DriveSetConfig, factory: DriveFactory) -> AbstractContextManager[list[Drive]]:
        """Open drives for the duration of the block; raises ConnectionError if one does not answer."""
