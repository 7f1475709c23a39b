"""Paths that people write in options and configuration files."""

from __future__ import annotations

import os
from pathlib import Path


def expand(path: Path) -> Path:
    """A path with `~` and `$NAME` replaced, as a shell does where it sees them.

    Raises:
        ValueError: A variable is not set, or there is no such user.
    """
    text = os.path.expanduser(os.path.expandvars(path))
    if "$" in text or text.startswith("~"):
        wrong = Path(text).parts[0] if text.startswith("~") else text[text.index("$") :].partition("/")[0]
        if not Path(text).exists():
            raise ValueError(f"{path}: {wrong} is not set, or not a user: write the path out")
    return Path(text)
