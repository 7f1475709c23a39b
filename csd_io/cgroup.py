"""Memory limits of a process: its memory cgroup, version 1 or 2."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

How = Literal["cgroup-v1", "cgroup-v2"]
PROC = Path("/proc")
_LIMITS: dict[How, tuple[str, ...]] = {
    "cgroup-v1": ("memory.limit_in_bytes",),
    "cgroup-v2": ("memory.max", "memory.high"),
}
_NO_LIMIT = 1 << 60  # version 1 reports "unlimited" as a number beyond any memory size
_ANON = {"cgroup-v1": ("total_rss", "total_shmem"), "cgroup-v2": ("anon", "shmem")}


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A memory cgroup.

    Attributes:
        how: Version of the hierarchy.
        folder: Folder with its files.
        root: Mount point of the hierarchy.
    """

    how: How
    folder: Path
    root: Path

    @property
    def limit_bytes(self) -> int | None:
        """Lowest memory limit of this cgroup and its ancestors; None if unlimited."""
        found = [self._limit(folder / name) for folder in self._upwards() for name in _LIMITS[self.how]]
        return min((each for each in found if each is not None), default=None)

    @property
    def unreclaimable_bytes(self) -> int:
        """Anonymous and shared memory of the cgroup, bytes, which the kernel cannot drop like page cache."""
        lines = (line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        stat = {name: int(value) for name, value in lines}
        return sum(stat.get(name, stat.get(name.removeprefix("total_"), 0)) for name in _ANON[self.how])

    def _upwards(self) -> list[Path]:
        inside = self.folder.relative_to(self.root)
        return [self.root / each for each in (inside, *inside.parents)]

    @staticmethod
    def _limit(file: Path) -> int | None:
        try:
            text = file.read_text().strip()
        except FileNotFoundError:  # the root has no limit
            return None
        return None if text == "max" or int(text) >= _NO_LIMIT else int(text)


def cgroup_of(process: int | Literal["self"] = "self", proc: Path = PROC) -> Cgroup | None:
    """Return the memory cgroup of a process; None if no hierarchy has a memory controller."""
    names = [line.split(":", 2) for line in (proc / str(process) / "cgroup").read_text().splitlines()]
    for line in (proc / str(process) / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, mount = before.split()[3:5]
        for _, controllers, name in names:
            inside = Path(name).relative_to(root) if Path(name).is_relative_to(root) else Path(name.lstrip("/"))
            folder = Path(mount) / inside
            if kind == "cgroup" and "memory" in options.split(",") and "memory" in controllers.split(","):
                return Cgroup("cgroup-v1", folder, Path(mount))
            if kind == "cgroup2" and not controllers and _has_memory(folder):
                return Cgroup("cgroup-v2", folder, Path(mount))
    return None


def _has_memory(folder: Path) -> bool:
    controllers = folder / "cgroup.controllers"
    return controllers.is_file() and "memory" in controllers.read_text().split()


def available_bytes(group: Cgroup | None, proc: Path = PROC) -> int:
    """Memory available for page cache, bytes: of the machine, and within the cgroup's limit."""
    lines = (proc / "meminfo").read_text().splitlines()
    (machine,) = (int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    limit = group.limit_bytes if group else None
    return machine if group is None or limit is None else max(0, min(machine, limit - group.unreclaimable_bytes))
