"""Liveness of a silent drive: whether its process has exited or is only stopped."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from csd_link.run_dir import pid_path


class Liveness:
    """Tracks the process of a served drive, if it runs on this machine as this user."""

    def __init__(self, name: str) -> None:
        self._file = pid_path(name)
        self.is_known = self._pid() is not None

    def _pid(self) -> int | None:
        try:
            return int(self._file.read_text())
        except (OSError, ValueError):
            return None

    def has_exited(self) -> bool:
        """Whether the process is known to have exited. A stopped process has not exited."""
        pid = self._pid()
        return self.is_known and (pid is None or not is_running(pid))


def cpu_ticks(pid: int) -> int:
    """CPU time used by a process and its living children, in clock ticks; 0 if it has exited."""
    ticks = 0
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = sum(map(int, fields[11:15]))  # own time, and that of reaped children
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ticks += sum(cpu_ticks(int(child)) for child in children)
    return ticks


def is_running(pid: int) -> bool:
    """Whether a process exists that neither has exited nor is exiting (waiting for its files to close)."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False
