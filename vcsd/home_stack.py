"""Undoing what a session did, in the process that did it."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any


class HomeStack(ExitStack):
    """Undoes nothing in a forked child: it has none of our threads, and the drives are its parent's."""

    def __init__(self) -> None:
        super().__init__()
        self._process = os.getpid()

    def __exit__(self, *exc_details: Any) -> bool:
        if os.getpid() != self._process:
            self.pop_all()
        return bool(super().__exit__(*exc_details))
