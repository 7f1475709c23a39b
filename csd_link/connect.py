"""Attaching to drives that other processes serve."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from csd_link.doorbell import SocketDoorbell, call
from csd_link.host_end import PATIENCE_S, Lost, WindowDevice
from csd_link.medium import FileMedium, MappedMedium
from csd_link.nvme import PassthroughMedium
from csd_link.run_dir import doorbell_path, window_path
from csd_link.served_drive import ADMIN
from csd_link.window import BLOCK_BYTES, DRIVE_HEADER, Identity, Kind, Medium, unpack

Connect = Callable[[], WindowDevice]


def connect(window: Path) -> WindowDevice:
    """The drive behind a window in shared memory, with a doorbell beside it; raises Lost where none answers."""
    try:
        line = call(doorbell_path(window))
    except OSError as error:
        raise Lost(f"no drive is served at {window}: {error}") from error
    try:
        return WindowDevice(MappedMedium(window), SocketDoorbell(line), line.close)
    except (OSError, ValueError) as error:
        line.close()
        raise Lost(f"no drive is served at {window}: {error}") from error


def open_window(path: Path, number: int = 0, offset_bytes: int = 0) -> WindowDevice:
    """Drive `number` of those whose windows follow each other in a file, a block device, or an NVMe character device,
    by reads and writes alone."""
    at = offset_bytes
    for _ in range(number):
        medium = _medium(path, at)
        at += _identity(medium, path).layout.blocks * BLOCK_BYTES
        medium.close()
    medium = _medium(path, at)
    _identity(medium, path)
    return WindowDevice(medium, close=medium.close)


def _medium(path: Path, offset_bytes: int) -> FileMedium | PassthroughMedium:
    kind = PassthroughMedium if path.is_char_device() else FileMedium
    return kind(path, offset_bytes)


def beating(medium: Medium) -> Identity | None:
    """Who serves a window at present, as the beat in its header says; None where it stands still."""
    with contextlib.suppress(ValueError, OSError):
        before, deadline = unpack(medium.read(DRIVE_HEADER)), time.monotonic() + PATIENCE_S
        while before and before.kind is Kind.DRIVE and time.monotonic() < deadline:
            now = unpack(medium.read(DRIVE_HEADER))
            if now and (now.drive, now.sequence) != (before.drive, before.sequence):
                return Identity.from_json(now.body)
            time.sleep(0.02)
    return None


def who_serves(name: str) -> Identity | None:
    """Who answers as the drive of this name at present."""
    window = window_path(name, ADMIN)
    return beating(MappedMedium(window)) if window.exists() else None


def _identity(medium: Medium, path: Path) -> Identity:
    """What the header says of a drive, alive or not."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        header = unpack(medium.read(DRIVE_HEADER)) if medium.blocks else None
        if header and header.kind is Kind.DRIVE:
            return Identity.from_json(header.body)
        if time.monotonic() > deadline:
            raise Lost(f"{path} holds no drive's window: serve one there first (vcsd serve --window {path})")
        time.sleep(0.02)
