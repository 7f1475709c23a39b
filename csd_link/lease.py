"""One host for a window at a time: a lock that the kernel drops with the process that holds it.

Hosts that reach a window through the same file or device of one machine see each other's locks. For others, behind a
guest's driver say, the window itself decides: the last host has it, and the one before is told who that is.
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

from csd_link.window import BLOCK_BYTES, HOST_HEADER, Kind, unpack

HANDOVER_S = 0.8  # a host that closes may take as long to drop its lock
MAX_WORDS = 200  # characters of a command line
_LOCK = struct.Struct("hhqqi4x")  # struct flock with 64-bit offsets: type, whence, start, length, pid
_HELD = (errno.EAGAIN, errno.EACCES)


class HeldError(ConnectionError):
    """Another host holds the window."""


class Lease:
    """The lock of a window, on the block that its host writes."""

    def __init__(self, path: Path, offset_bytes: int = 0, patience_s: float = HANDOVER_S) -> None:
        """Take the lock.

        Args:
            path: File or device that the window is in.
            offset_bytes: Where it begins there.
            patience_s: How long to wait for a host that holds it, s.

        Raises:
            HeldError: Another host holds it; the message says which.
            OSError: The file cannot be opened.
        """
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._drop = weakref.finalize(self, os.close, self._fd)  # of a connection that nobody closes too
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
        except OSError:  # a character device is read by commands alone
            return holder(bytes(BLOCK_BYTES))

    def close(self) -> None:
        """Drop the lock; nothing happens if that was done."""
        with suppress(OSError):  # of a mount whose drive has died; the descriptor is gone all the same
            self._drop()


def closing_both(lease: Lease, close: Callable[[], None]) -> Callable[[], None]:
    """What closes a connection and then drops its lock."""

    def both() -> None:
        try:
            close()
        finally:
            lease.close()

    return both


def own_words() -> bytes:
    """What a host's header says of this process: JSON."""
    try:
        words = Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        words = "?"
    return json.dumps({"pid": os.getpid(), "machine": platform.node(), "command": words[:MAX_WORDS]}).encode()


def holder(raw: bytes | bytearray) -> str:
    """Which host has written a header, as words for people.

    Args:
        raw: The block of the host's header, 4 KiB.
    """
    header = unpack(bytearray(raw))
    try:
        assert header is not None and header.kind is Kind.HOST
        values = json.loads(bytes(header.body))
        pid, machine, command = int(values["pid"]), str(values["machine"]), str(values["command"])
    except (AssertionError, ValueError, KeyError, TypeError):
        return "another host"
    where = "" if machine == platform.node() else f" on {machine}"
    printable = "".join(each if each.isprintable() else " " for each in command)
    return f"process {pid}{where} ({' '.join(printable.split())[:MAX_WORDS]})"
