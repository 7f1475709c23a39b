"""Processes that end with the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # Linux: prctl(2)


def end_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends, however it ends.

    Args:
        parent: Process number of the parent. If it has ended already, this process ends at once.
        signum: The signal.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(1)
