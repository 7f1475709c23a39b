"""What the kernel allows a process to have of memory, by its control group of either version."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

How = Literal["cgroup-v1", "cgroup-v2"]
PROC = Path("/proc")
_LIMITS: dict[How, tuple[str, ...]] = {
    "cgroup-v1": ("memory.limit_in_bytes",),
    "cgroup-v2": ("memory.max", "memory.high"),
}
_NO_LIMIT = 1 << 60  # version 1 says so by a number beyond all memory
_ANON = {"cgroup-v1": ("total_rss", "total_shmem"), "cgroup-v2": ("anon", "shmem")}


@dataclass(frozen=True, slots=True)
class Group:
    """A control group of memory. folder: its files. root: where the hierarchy is mounted."""

    how: How
    folder: Path
    root: Path

    @property
    def limit_bytes(self) -> int | None:
        """The least limit of it and of those above it; None where there is none."""
        found = [self._limit(folder / name) for folder in self._upwards() for name in _LIMITS[self.how]]
        return min((each for each in found if each is not None), default=None)

    @property
    def kept_bytes(self) -> int:
        """What it has of anonymous and shared memory, which is no page cache that could be dropped."""
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
        except FileNotFoundError:  # the root has none
            return None
        return None if text == "max" or int(text) >= _NO_LIMIT else int(text)


def group_of(process: int | Literal["self"] = "self", proc: Path = PROC) -> Group | None:
    """The group that limits a process's memory; None where no hierarchy has a memory controller."""
    names = [line.split(":", 2) for line in (proc / str(process) / "cgroup").read_text().splitlines()]
    for line in (proc / str(process) / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, mount = before.split()[3:5]
        for _, controllers, name in names:
            inside = Path(name).relative_to(root) if Path(name).is_relative_to(root) else Path(name.lstrip("/"))
            folder = Path(mount) / inside
            if kind == "cgroup" and "memory" in options.split(",") and "memory" in controllers.split(","):
                return Group("cgroup-v1", folder, Path(mount))
            if kind == "cgroup2" and not controllers and _has_memory(folder):
                return Group("cgroup-v2", folder, Path(mount))
    return None


def _has_memory(folder: Path) -> bool:
    controllers = folder / "cgroup.controllers"
    return controllers.is_file() and "memory" in controllers.read_text().split()


def available_bytes(group: Group | None, proc: Path = PROC) -> int:
    """Memory that is left for page cache: of the machine, and of the group where that has a limit."""
    lines = (proc / "meminfo").read_text().splitlines()
    (machine,) = (int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    limit = group.limit_bytes if group else None
    return machine if group is None or limit is None else max(0, min(machine, limit - group.kept_bytes))


@contextmanager
def limited(limit_bytes: int) -> Iterator[Group]:
    """A new group below this process's own, or below the root, with a limit; it is gone afterwards.

    Raises OSError where this process may not make one.
    """
    own = group_of()
    if own is None:
        raise FileNotFoundError("no hierarchy of control groups has a memory controller")
    group = _make(own)
    try:
        (group.folder / _LIMITS[group.how][0]).write_text(str(limit_bytes))
        yield group
    finally:
        _remove(group.folder)


def _make(own: Group) -> Group:
    """In version 2 a group that has processes has no groups with a controller below it, but for the root."""
    for parent in dict.fromkeys((own.folder, own.root)):
        folder = parent / f"vcsd-{os.getpid()}"
        try:
            if own.how == "cgroup-v2":
                (parent / "cgroup.subtree_control").write_text("+memory")
            folder.mkdir()
        except OSError as error:
            failure = error
        else:
            return Group(own.how, folder, own.root)
    raise failure


def join(group: Group, process: int) -> None:
    """Have a process in a group; memory that it has already is counted where it was."""
    (group.folder / "cgroup.procs").write_text(str(process))


def _remove(folder: Path) -> None:
    for _ in range(100):  # a process that has just ended may still be in it
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.02)
    folder.rmdir()
