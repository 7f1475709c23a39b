"""A drive's folder: who has it, and what drive it holds."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import IO

from csd_spec import DriveSpec, Geometry

LOCK, DESCRIPTION, CONTENT = "lock", "drive.json", "content.bin"


class Hold:
    """Keeps others from a folder until it is closed, or this process ends however it ends.

    shared: others may read meanwhile. Raises ValueError with the number of the process that has the folder.
    """

    def __init__(self, path: Path, shared: bool = False) -> None:
        file = path / LOCK
        self._file: IO[str] | None = None
        if shared and not file.exists():
            return  # nobody has ever opened it to write
        lock = os.fdopen(os.open(file, os.O_RDWR | (0 if shared else os.O_CREAT) | os.O_CLOEXEC, 0o600), "r+")
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = lock.read().strip()
            lock.close()
            raise ValueError(f"{path}: process {holder or 'unknown'} has this drive's folder: stop it first") from None
        self._file = lock
        if not shared:
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()

    def close(self) -> None:
        """Let go of it."""
        if self._file:
            self._file.close()


def take(spec: DriveSpec, path: Path) -> Hold:
    """A folder for a drive, made where it is not there: held, and described as that drive's.

    Raises ValueError where another process has it, or where it holds a drive of another geometry.
    """
    path.mkdir(parents=True, exist_ok=True)
    held = Hold(path)
    try:
        describe(spec, path)
    except BaseException:
        held.close()
        raise
    return held


def described(path: Path) -> DriveSpec:
    """The drive that a folder holds; raises ValueError where it holds none."""
    try:
        return DriveSpec.from_dict(json.loads((path / DESCRIPTION).read_text()))
    except (OSError, ValueError) as error:
        raise ValueError(f"no drive in {path}: {error}") from error


def describe(spec: DriveSpec, path: Path) -> None:
    """Write down what a folder holds, where that is not written there yet; raises ValueError for another geometry.

    The description is written aside and put in place whole, so that there is one at every moment.
    """
    try:
        there = described(path)
    except ValueError:
        there = None
    if there == spec:
        return
    if there:
        _check_geometry(there.geometry, spec.geometry, path)
    content = path / CONTENT
    if content.exists() and content.stat().st_size != spec.geometry.capacity_bytes:
        size = content.stat().st_size
        raise ValueError(f"{content}: has {size:,} bytes, the drive that is asked for {spec.geometry.capacity_bytes:,}")
    aside = path / f"{DESCRIPTION}.new"
    with aside.open("w") as file:
        file.write(json.dumps(asdict(spec), indent=1))
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path / DESCRIPTION)


def _check_geometry(there: Geometry, asked: Geometry, path: Path) -> None:
    for name, value in asdict(asked).items():
        if value != (found := getattr(there, name)):
            raise ValueError(
                f"{path}: holds a drive with {name} = {found}, and {name} = {value} is asked for: "
                f"name the drive that it was made as, or another folder"
            )
