"""Lines of the decoding and checking code that inputs of the fuzzer reach."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import csd_firmware.attend
import csd_firmware.check
import csd_firmware.handlers
import csd_firmware.tenants
import csd_link.drive_end
import csd_link.host_end
import csd_link.window
import csd_link.wire
from csd_spec.verbs import verb_of

DECODING = csd_link.wire, csd_link.window, csd_link.drive_end, csd_link.host_end
CHECKING = csd_firmware.check, csd_firmware.handlers, csd_firmware.attend, csd_firmware.tenants
WATCHED = {module.__file__ for module in (*DECODING, *CHECKING)}


class Coverage:
    """Pairs of lines of the watched files that followed each other, for each verb: all go through the same lines."""

    def __init__(self) -> None:
        self.pairs: set[tuple[int, object, int, int]] = set()
        self._opcode = -1

    @contextmanager
    def watch(self, opcode: int) -> Iterator[None]:
        self._opcode = opcode if verb_of(opcode) else -1
        csd_link.wire.form_of.cache_clear()  # coverage must not depend on earlier inputs
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in WATCHED:
            return None
        code, last, pairs, opcode = frame.f_code, 0, self.pairs, self._opcode

        def line(frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
            nonlocal last
            pairs.add((opcode, code, last, frame.f_lineno))
            last = frame.f_lineno
            return line

        return line
