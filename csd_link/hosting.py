"""Hosting options: resources of the machine for its drives, in this process or in their own processes."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from csd_io.folder import DURABILITIES, Durability
from csd_io.medium import IN_MEMORY, Medium

MAX_MIB, MAX_THREADS = 1 << 24, 1024  # limits of user settings


@dataclass(frozen=True, slots=True, kw_only=True)
class HostingOptions:
    """How drives are run; simulated results do not depend on these options.

    Attributes:
        durability: What flushed files survive: `process`, the exit of the drive's process; `host`, a power loss.
        medium: Storage of pages at run time: in memory, or in the files of the drive's folder.
        threads: Kernel threads per drive; None divides the cores among the drives.
    """

    durability: Durability = "process"
    medium: Medium = IN_MEMORY
    threads: int | None = None

    @property
    def has_overrides(self) -> bool:
        """Whether any option differs from its default."""
        return any(getattr(self, field.name) != field.default for field in fields(HostingOptions))

    def hosting_fields(self, drives: int) -> dict[str, Any]:
        """Return these options as a dict, for one of `drives` drives."""
        threads = self.threads or max(1, len(os.sched_getaffinity(0)) // drives)
        return {"durability": self.durability, "medium": self.medium, "threads": threads}

    def _check(self, folder: Path | None) -> None:
        """Raise ValueError for an invalid option; `folder` is where the files would be stored."""
        if self.durability not in DURABILITIES:
            raise ValueError(f"durability = {self.durability!r}: must be one of {', '.join(DURABILITIES)}")
        if self.medium.kind != "memory" and not folder:
            raise ValueError(f"medium = {self.medium.kind}: needs a folder to keep drives in")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads = {self.threads}: must be at least 1")
