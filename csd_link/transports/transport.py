"""What a way to drives is: one small class, one instance in the table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from csd_link.connect import Connect
from csd_link.driveset import DriveSet
from csd_link.finding import Missing
from csd_spec import Device

Make = Callable[[Path | None], Device]


@dataclass(frozen=True, slots=True)
class DriveFactory:
    """How drives come to be: the firmware is no business of the link's, so whoever opens drives hands this in.

    in_process: for a set of drives, what makes one of them in this process, on a folder or in memory.
    server: the command that serves the drives of a file (`ServedDrives.to_json`), which is its last argument.
    """

    in_process: Callable[[DriveSet], Make]
    server: tuple[str, ...]


def check_served(drives: DriveSet, where: str) -> None:
    """Raise ValueError for what drives that are served already cannot be given. where: words for messages."""
    if drives.methods:
        raise ValueError(
            f"methods = {drives.methods}: the drives at {where} are served already, and know what their operator has"
            f" loaded (vcsd serve --methods)"
        )
    if drives.asked:
        raise ValueError(
            f"durability, medium and threads of the drives at {where} are as their operator has asked for"
            f" (vcsd serve --durability, --medium, --threads)"
        )


class Transport(ABC):
    """A way to drives. A new one is a file with one of these, and a line in the table or an entry point.

    name: what a user begins it with. form: how a user writes it.
    """

    name: str
    form: str

    def check(self, where: str) -> None:
        """Raise ValueError for what may not stand behind the name and a colon."""
        if where:
            raise ValueError(f"transport = {self.name}:{where}: nothing stands behind {self.name}")

    def missing(self) -> Missing | None:
        """What this machine lacks for it."""
        return None

    def served(self, drives: DriveSet) -> Sequence[Connect]:
        """How to reach drives that others serve there already; none where `open` makes them."""
        return ()

    def more(self, drives: DriveSet, known: Collection[str]) -> Connect | None:
        """How to reach a drive that may replace a lost one; None if there is none. known: names of drives in use."""
        return None

    def draining(self, drives: DriveSet) -> Collection[str] | None:
        """Names of drives whose hosts are to use others from now on; None if the transport never asks for that."""
        return None

    @abstractmethod
    def open(self, drives: DriveSet, factory: DriveFactory) -> AbstractContextManager[list[Device]]:
        """The drives, until the block ends; raises ConnectionError where one does not answer."""
