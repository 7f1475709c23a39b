"""Access of one thread at a time to KV data, which the garbage collector may drop in any thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Exclusive(Generic[T]):
    """Lets one thread in at a time, and frees what was dropped between two of them."""

    def __init__(self, free: Callable[[T], None], where: str) -> None:
        """Create it open.

        Args:
            free: Method that frees a dropped object, called with access. Its owner has this object, and is not kept.
            where: Location of the KV data, for messages.
        """
        self._free, self._where = weakref.WeakMethod(free), where
        self._lock = threading.Lock()
        self._home = threading.get_ident()  # last thread with access
        self._holder: int | None = None
        self._dropped: list[T] = []

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Access for one forward or crop; other threads wait.

        Raises:
            ValueError: This thread has access already.
        """
        if self._holder == threading.get_ident():
            raise ValueError(f"the KV cache {self._where} cannot be changed by this thread during its own forward")
        with self._lock:
            self._holder = self._home = threading.get_ident()
            try:
                self._free_dropped()
                yield
            finally:
                try:
                    self._free_dropped()
                finally:
                    self._holder = None

    def drop(self, dropped: T) -> None:
        """Free an object now or before the next access.

        The garbage collector calls this at any time and in any thread, including those of drives and of copies, which
        must not wait for commands or copies.
        """
        self._dropped.append(dropped)
        if threading.get_ident() == self._home and self._lock.acquire(blocking=False):
            try:
                self._free_dropped()
            finally:
                self._lock.release()

    def _free_dropped(self) -> None:
        while self._dropped:
            dropped, free = self._dropped.pop(), self._free()
            if free is not None:
                free(dropped)
