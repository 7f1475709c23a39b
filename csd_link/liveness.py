"""Whether the process of a drive that is silent has ended, or only stands still."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from csd_link.run_dir import pid_path


class Liveness:
    """Knows a served drive by its process, where that is one of this machine and this user."""

    def __init__(self, name: str) -> None:
        self._file = pid_path(name)
        self.known = self._pid() is not None

    def _pid(self) -> int | None:
        try:
            return int(self._file.read_text())
        except (OSError, ValueError):
            return None

    def ended(self) -> bool:
        """Whether it is known that the process is no more. One that is stopped has not ended."""
        pid = self._pid()
        return self.known and (pid is None or not running(pid))


def cpu_ticks(pid: int) -> int:
    """CPU time that a process and its living children have used so far, in clock ticks; 0 if it has ended."""
    ticks = 0
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = sum(map(int, fields[11:15]))  # its own, and that of children that were waited for
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ticks += sum(cpu_ticks(int(child)) for child in children)
    return ticks


def running(pid: int) -> bool:
    """Whether there is a process of this number that has not ended, nor is about to, waiting for its files to close."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False
