"""Exclusive access of one host to a window: a lock that the kernel releases when its process exits.

Hosts that reach a window through the same file or device of one machine see each other's locks. For other hosts (behind
a guest's driver, for example), the window itself decides: the last host gets it, and the previous one is told who has.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import struct
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from csd_link.window import BLOCK_BYTES, HOST_HEADER, BlockKind, unpack

HANDOVER_S = 0.8  # time for which a closing host may still hold its lock
MAX_WORDS = 200  # characters of a command line
_LOCK = struct.Struct("hhqqi4x")  # struct flock with 64-bit offsets: type, whence, start, length, pid
_HELD = (errno.EAGAIN, errno.EACCES)


class HeldError(ConnectionError):
    """Another host holds the window."""


class Lease:
    """The lock of a window, on the block that its host writes."""

    def __init__(self, path: Path, offset_bytes: int = 0, patience_s: float = HANDOVER_S) -> None:
        """Acquire the lock.

        Args:
            path: File or device that contains the window.
            offset_bytes: Offset of the window in it.
            patience_s: How long to wait for a host that holds the lock, seconds.

        Raises:
            HeldError: Another host holds it; the message names it.
            OSError: The file cannot be opened.
        """
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._drop = weakref.finalize(self, os.close, self._fd)  # also if the connection is never closed
        at = offset_bytes + HOST_HEADER * BLOCK_BYTES
        lock = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, BLOCK_BYTES, 0)
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, lock)
                return
            except OSError as error:
                if error.errno not in _HELD:
                    return  # this file system or device has no locks: the window itself decides
                if time.monotonic() > deadline:
                    who = self._holder(at)
                    self.close()
                    raise HeldError(f"{path} is in use by {who}: end it, or use another tenant's window") from error
                time.sleep(0.01)

    def _holder(self, at: int) -> str:
        try:
            return holder(os.pread(self._fd, BLOCK_BYTES, at))
        except OSError:  # character devices do not support pread
            return holder(bytes(BLOCK_BYTES))

    def close(self) -> None:
        """Release the lock; does nothing if it is already released."""
        with suppress(OSError):  # the mount's drive has died; the descriptor is closed anyway
            self._drop()


def close_both(lease: Lease, close: Callable[[], None]) -> Callable[[], None]:
    """Return a function that closes a connection and then releases its lock."""

    def both() -> None:
        try:
            close()
        finally:
            lease.close()

    return both


def describe_process() -> bytes:
    """Description of this process for a host header, as JSON."""
    try:
        words = Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        words = "?"
    return json.dumps({"pid": os.getpid(), "machine": platform.node(), "command": words[:MAX_WORDS]}).encode()


def holder(raw: bytes | bytearray) -> str:
    """Describe the host that wrote a header, for messages.

    Args:
        raw: The block of the host's header, 4 KiB.
    """
    header = unpack(bytearray(raw))
    try:
        assert header is not None and header.kind is BlockKind.HOST
        values = json.loads(bytes(header.body))
        pid, machine, command = int(values["pid"]), str(values["machine"]), str(values["command"])
    except (AssertionError, ValueError, KeyError, TypeError):
        return "another host"
    where = "" if machine == platform.node() else f" on {machine}"
    printable = "".join(character if character.isprintable() else " " for character in command)
    return f"process {pid}{where} ({' '.join(printable.split())[:MAX_WORDS]})"
