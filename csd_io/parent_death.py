"""Parent-death signal: ends a process when the process that started it exits."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # Linux: prctl(2)


def end_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when its parent exits, on success or failure.

    Args:
        parent: Process number of the parent. If it has exited already, this process exits at once.
        signum: The signal.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(1)
