"""Mounts that a drive has left behind."""

from __future__ import annotations

import subprocess
from pathlib import Path


def unmount(mount: Path) -> None:
    """Take away what is mounted on a folder, whoever still uses it; nothing where nothing is.

    Raises CalledProcessError where it cannot be.
    """
    mounted_at = {line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()}
    if str(mount.absolute()).replace(" ", "\\040") in mounted_at:
        subprocess.run(["fusermount3", "-u", "-z", str(mount)], check=True, capture_output=True)
