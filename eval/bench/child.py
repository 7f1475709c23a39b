"""Work in a child process, which gets lines and answers with lines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def started(module: str, job: str) -> Iterator[subprocess.Popen[str]]:
    """Run `python -m module`, which prints a line when it is ready and gets a job; it is killed when the block ends."""
    command = [sys.executable, "-m", module]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        answer(child)
        tell(child, job)
        yield child
    finally:
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout, child.stderr):
            assert stream is not None
            stream.close()


def tell(child: subprocess.Popen[str], text: str) -> None:
    """Write to a process's standard input."""
    assert child.stdin is not None
    child.stdin.write(text)
    child.stdin.flush()


def answer(child: subprocess.Popen[str]) -> str:
    """Wait for a line that a process prints; raises OSError with its last error if it has exited."""
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        _, errors = child.communicate()
        raise OSError((errors.strip().splitlines()[-1:] or [f"exit code {child.returncode}"])[0])
    return line
