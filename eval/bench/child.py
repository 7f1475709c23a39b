"""Work in a child process: under a memory limit, with I/O counters of its own, or to be killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from csd_io.cgroup import Cgroup, join


@contextmanager
def started(module: str, job: str, group: Cgroup | None) -> Iterator[subprocess.Popen[str]]:
    """Run `python -m module` with a job on its standard input; it is killed when the block ends.

    The child prints a line when it is ready, is then moved into the group, and receives the job.
    """
    command = [sys.executable, "-m", module]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        if group:
            join(group, child.pid)
        child.stdin.write(job)
        child.stdin.flush()
        yield child
    finally:
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout, child.stderr):
            assert stream is not None
            stream.close()


def check(child: subprocess.Popen[str], limit_s: float | None = None) -> str:
    """Wait until a process exits, and return its remaining output; raises OSError with its last line if it fails."""
    out, errors = child.communicate(timeout=limit_s)
    if child.returncode:
        raise OSError((errors.strip().splitlines()[-1:] or [f"exit code {child.returncode}"])[0])
    return out


def done(module: str, job: str, group: Cgroup | None, limit_s: float) -> dict[str, Any]:
    """Figures that `python -m module` prints for a job, as JSON; raises OSError if it exits without any."""
    with started(module, job, group) as child:
        figures: dict[str, Any] = json.loads(check(child, limit_s))
    return figures


def tell(child: subprocess.Popen[str], text: str) -> None:
    """Write to a process's standard input."""
    assert child.stdin is not None
    child.stdin.write(text)
    child.stdin.flush()


def answer(child: subprocess.Popen[str]) -> str:
    """Wait for a line that a process prints; raises OSError if it has exited."""
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        check(child)
        raise OSError("a process exited early")
    return line
