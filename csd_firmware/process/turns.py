"""Whose turn it is: a lock that those who wait get in the order in which they came."""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """A lock for what many use one after the other; `threading.Lock` may go to the same thread again and again.

    Whoever leaves hands it to the one who has waited longest. So a thread with a queue of its own, which waits for one
    thing at a time, gets one turn for each of everybody else's.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()  # each locked until its turn comes
        self._taken = False

    def __enter__(self) -> None:
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        mine.acquire()

    def __exit__(self, *exception: object) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False
