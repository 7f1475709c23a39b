"""What a machine gives the drives that run on it: the same for drives in this process and in processes of their own."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from csd_io.folder import DURABILITIES, Durability
from csd_io.medium import IN_MEMORY, Medium

MAX_MIB, MAX_THREADS = 1 << 24, 1024  # of what users may ask for


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosted:
    """Fields of whatever says how drives run; no figure of a drive depends on them.

    durability: what a flush to files outlives: `process`, the drive's own; `host`, a power cut of this machine.
    medium: where pages are while a drive has power: in memory, or in the files of its folder.
    threads: of a drive's kernels; None is its share of the cores.
    """

    durability: Durability = "process"
    medium: Medium = IN_MEMORY
    threads: int | None = None

    @property
    def asked(self) -> bool:
        """Whether anything but the defaults is asked for."""
        return any(getattr(self, each.name) != each.default for each in fields(Hosted))

    def hosted(self, drives: int) -> dict[str, Any]:
        """These fields, for one of so many drives."""
        threads = self.threads or max(1, len(os.sched_getaffinity(0)) // drives)
        return {"durability": self.durability, "medium": self.medium, "threads": threads}

    def _check(self, folder: Path | None) -> None:
        """Raise ValueError for what is off; folder: where the files would be."""
        if self.durability not in DURABILITIES:
            raise ValueError(f"durability = {self.durability!r}: must be one of {', '.join(DURABILITIES)}")
        if self.medium.kind != "memory" and not folder:
            raise ValueError(f"medium = {self.medium.kind}: needs a folder to keep drives in")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads = {self.threads}: at least 1 is needed")
