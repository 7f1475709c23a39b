"""Ordered submission by several threads, so that drives get the same commands in the same order in every run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition


class OrderBrokenError(RuntimeError):
    """Another thread failed; its own error has the reason."""


class CommandOrder:
    """Admits `count` threads, numbered from 0, one at a time in cyclic order."""

    def __init__(self, count: int) -> None:
        self._waiting = list(range(count))  # the head is next
        self._change = Condition()
        self._broken = False

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """Wait for this thread's turn; the next thread's starts at the end of the block."""
        with self._change:
            self._change.wait_for(lambda: self._broken or self._waiting[0] == number)
            if self._broken:
                raise OrderBrokenError("another micro-batch of this step failed")
            yield
            self._waiting.append(self._waiting.pop(0))
            self._change.notify_all()

    def leave(self, number: int, failed: bool) -> None:
        """Remove this thread from the order; if it failed, the others are woken with an error."""
        with self._change:
            self._waiting.remove(number)
            self._broken |= failed
            self._change.notify_all()
