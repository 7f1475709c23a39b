"""FIFO lock: waiting threads get it in the order of arrival."""

from __future__ import annotations

import threading
from collections import deque


class FifoLock:
    """A fair lock; `threading.Lock` may go to the same thread repeatedly.

    It is handed to the thread that has waited longest. So a thread that submits one request after the other gets one
    turn per turn of every other thread.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()  # each is locked until its turn
        self._taken = False

    def __enter__(self) -> None:
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            ticket = threading.Lock()
            ticket.acquire()
            self._waiting.append(ticket)
        ticket.acquire()

    def __exit__(self, *exception: object) -> None:
        with self._guard:
            assert self._taken, "a turn ends that nobody had"
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False
