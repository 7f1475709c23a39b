"""Work that has to be done in a process of its own: under a limit of memory, or with counters that nobody shares."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from csd_io.cgroup import Group, join


def done(module: str, job: str, group: Group | None, limit_s: float) -> dict[str, Any]:
    """The figures, as JSON, that `python -m module` prints for a job on its standard input.

    It says a line when it is there, is put into the group, and gets the job then. Raises OSError with its last words
    where it ends without figures.
    """
    command = [sys.executable, "-m", module]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        if group:
            join(group, child.pid)
        out, errors = child.communicate(job, limit_s)
    finally:
        child.kill()
        child.wait()
    if child.returncode:
        raise OSError((errors.strip().splitlines()[-1:] or [f"ended with {child.returncode}"])[0])
    figures: dict[str, Any] = json.loads(out)
    return figures
