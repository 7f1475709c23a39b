"""Events of served drives on standard error: lines for people, or one JSON object a line for programs."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from typing import Literal

Format = Literal["text", "json"]
Level = Literal["info", "warning", "error"]

_format: Format = "text"  # of this process and of those that it forks


def set_format(chosen: Format) -> None:
    """Choose the format of events in this process and its forks."""
    global _format
    _format = chosen


def emit(event: str, message: str, level: Level = "info", drive: str = "", **fields: object) -> None:
    """Write an event; a standard error that its reader has closed is no error of the drive's.

    Args:
        event: Its name, for programs.
        message: One or more lines for people; they name no secret such as a host's NQN key.
        level: Its level.
        drive: Name of the drive that it is about.
        fields: Further fields for programs.
    """
    if _format == "text":
        _write(message)
        return
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now := time.time())) + f".{int(now % 1 * 1000):03d}Z"
    said: dict[str, object] = {"time": at, "level": level, "event": event, "message": message}
    _write(json.dumps(said | ({"drive": drive} if drive else {}) | fields))


def _write(line: str) -> None:
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)
