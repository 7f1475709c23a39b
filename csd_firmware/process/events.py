"""Events of served drives on stderr: text lines, or one JSON object per line."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from typing import Literal

Format = Literal["text", "json"]
Level = Literal["info", "warning", "error"]

_format: Format = "text"  # of this process and its forks


def set_format(chosen: Format) -> None:
    """Set the format of events in this process and its forks."""
    global _format
    _format = chosen


def emit(event: str, message: str, level: Level = "info", drive: str = "", **fields: object) -> None:
    """Write an event; a closed stderr is ignored.

    Args:
        event: Name of the event.
        message: One or more lines of text, without secrets.
        level: Severity.
        drive: Name of the drive that it concerns.
        fields: Further fields for the JSON format.
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
