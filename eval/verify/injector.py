"""Exceptions raised inside the product's code, at a chosen line or call."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

import csd_spec

ROOT = Path(csd_spec.__file__).parents[1]
PACKAGES = tuple(f"{ROOT / name}{os.sep}" for name in ("csd_firmware", "ftl", "attention_engine", "csd_io", "csd_spec"))

Event = Literal["line", "allocation"]


class Injected(Exception):
    """The exception that is raised at a line."""


class InjectedInterrupt(BaseException):
    """The same, as one that is not an Exception, like those of signal handlers."""


class Injector:
    """Counts events of the product's code inside a `with` block, and raises an exception at one of them.

    Attributes:
        seen: The source line of each event so far.
        has_raised: Whether the exception was raised.
    """

    def __init__(self, event: Event, at: int | None = None) -> None:
        """Args:
        event: `line`: before each line; `allocation`: at each call of a C function, which may allocate memory.
        at: Number of the event that raises; None only counts.
        """
        self._event, self._at = event, at
        self.seen: list[tuple[str, int]] = []
        self.has_raised = False
        self._ours: dict[CodeType, bool] = {}

    def __enter__(self) -> Injector:
        if self._event == "line":
            sys.settrace(self._trace)
        else:
            sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        sys.setprofile(None)

    def _is_ours(self, code: CodeType) -> bool:
        is_ours = self._ours.get(code)
        if is_ours is None:
            is_ours = self._ours[code] = code.co_filename.startswith(PACKAGES)
        return is_ours

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if self._is_ours(frame.f_code) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self._count(frame)
        return self._line

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call" and self._is_ours(frame.f_code):
            self._count(frame)

    def _count(self, frame: FrameType) -> None:
        self.seen.append((frame.f_code.co_filename, frame.f_lineno))
        if len(self.seen) - 1 != self._at:
            return
        self.has_raised = True
        sys.settrace(None)
        sys.setprofile(None)
        if self._event == "allocation":
            raise MemoryError("injected")
        raise InjectedInterrupt if self._at % 3 == 0 else Injected
