"""Attaches to drives that other processes serve."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from csd_link.doorbell import SocketDoorbell, call
from csd_link.host_end import HEARTBEAT_TIMEOUT_S, AttachedDrive, DriveLostError, WindowDrive
from csd_link.lease import HeldError, Lease, close_both
from csd_link.medium import FileMedium, MappedMedium
from csd_link.nvme import PassthroughMedium
from csd_link.run_dir import doorbell_path, window_path
from csd_link.served_drive import ADMIN
from csd_link.window import BLOCK_BYTES, DRIVE_HEADER, BlockKind, Identity, WindowMedium, unpack

Connect = Callable[[], AttachedDrive]


def connect(window: Path) -> WindowDrive:
    """Attach to a drive through its window in shared memory, with a doorbell.

    Raises:
        DriveLostError: No drive answers, or another host holds the window.
    """
    with ExitStack() as undo:
        try:
            lease = Lease(window)
            undo.callback(lease.close)
            line = call(doorbell_path(window))  # after the lease: the drive closes the previous host's connection
            undo.callback(line.close)
            device = WindowDrive(MappedMedium(window), SocketDoorbell(line), close_both(lease, line.close))
        except HeldError as error:
            raise DriveLostError(str(error)) from error
        except (OSError, ValueError) as error:
            raise DriveLostError(f"no drive is served at {window}: {error}") from error
        undo.pop_all()
    return device


def open_window(path: Path, number: int = 0, offset_bytes: int = 0) -> WindowDrive:
    """Attach to drive `number` through windows that follow each other in a file, block device or NVMe character device.

    The windows are accessed with reads and writes only, without a doorbell.

    Raises:
        DriveLostError: No drive answers, or another host holds the window.
    """
    at = offset_bytes
    for _ in range(number):
        medium = _medium(path, at)
        at += _identity(medium, path).layout.blocks * BLOCK_BYTES
        medium.close()
    with ExitStack() as undo:
        medium = _medium(path, at)
        undo.callback(medium.close)
        _identity(medium, path)
        try:
            lease = Lease(path, at)
        except HeldError as error:
            raise DriveLostError(str(error)) from error
        undo.callback(lease.close)
        device = WindowDrive(medium, close=close_both(lease, medium.close))
        undo.pop_all()
    return device


def _medium(path: Path, offset_bytes: int) -> FileMedium | PassthroughMedium:
    kind = PassthroughMedium if path.is_char_device() else FileMedium
    return kind(path, offset_bytes)


def find_live_drive(medium: WindowMedium) -> Identity | None:
    """Identify the drive that serves a window; None if its heartbeat has stopped."""
    with contextlib.suppress(ValueError, OSError):
        before, deadline = unpack(medium.read(DRIVE_HEADER)), time.monotonic() + HEARTBEAT_TIMEOUT_S
        while before and before.kind is BlockKind.DRIVE and time.monotonic() < deadline:
            now = unpack(medium.read(DRIVE_HEADER))
            if now and (now.drive, now.sequence) != (before.drive, before.sequence):
                return Identity.from_json(now.body)
            time.sleep(0.02)
    return None


def find_server(name: str) -> Identity | None:
    """Identify the process that currently serves the drive with this name; None if there is none."""
    window = window_path(name, ADMIN)
    return find_live_drive(MappedMedium(window)) if window.exists() else None


def _identity(medium: WindowMedium, path: Path) -> Identity:
    """Read the drive's header, even if the drive is not running; waits while it is being written."""
    deadline = time.monotonic() + HEARTBEAT_TIMEOUT_S
    while True:
        header = unpack(medium.read(DRIVE_HEADER)) if medium.blocks else None
        if header and header.kind is BlockKind.DRIVE:
            return Identity.from_json(header.body)
        if time.monotonic() > deadline:
            raise DriveLostError(
                f"{path} holds no drive's window: serve one there first (vcsd drive serve --window-device {path})"
            )
        time.sleep(0.02)
