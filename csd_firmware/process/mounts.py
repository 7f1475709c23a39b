"""Removal of stale FUSE mounts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def unmount(mount: Path) -> None:
    """Unmount a folder lazily, even if it is in use; does nothing if it is not mounted.

    Raises CalledProcessError on failure.
    """
    mounted_at = {line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()}
    if os.path.realpath(mount).replace(" ", "\\040") in mounted_at:
        subprocess.run(["fusermount3", "-u", "-z", str(mount)], check=True, capture_output=True)
