"""Doorbells: notify the other side of a window that there is something to read."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol


class Doorbell(Protocol):
    """Both methods raise ConnectionError once the other side is known to be gone."""

    def ring(self) -> None:
        """Wake the other side."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until the other side rings, or until the timeout."""
        ...

    def close(self) -> None:
        """Close the doorbell."""
        ...


class Polling:
    """No doorbell: poll after a short sleep that grows while nothing arrives."""

    def __init__(self, min_s: float = 2e-5, max_s: float = 2e-3) -> None:
        self._min_s, self._max_s, self._next_s = min_s, max_s, min_s

    def ring(self) -> None:
        self._next_s = self._min_s

    def wait(self, timeout_s: float) -> None:
        time.sleep(min(self._next_s, timeout_s))
        self._next_s = min(2 * self._next_s, self._max_s)

    def close(self) -> None: ...


@contextmanager
def _address(path: Path) -> Iterator[str]:
    """Address a socket through its folder: addresses are limited to 108 bytes, paths are not."""
    folder = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def call(path: Path) -> socket.socket:
    """Connect to the doorbell at a path; raises OSError if no process listens."""
    line = socket.socket(socket.AF_UNIX)
    try:
        with _address(path) as address:
            line.connect(address)
    except OSError:
        line.close()
        raise
    return line


class SocketDoorbell:
    """Sends a byte over a connected Unix socket, which closes at once when the other process dies."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def ring(self) -> None:
        with suppress(BlockingIOError):  # full: a wake-up is already pending
            self._socket.send(b"!", socket.MSG_NOSIGNAL)

    def wait(self, timeout_s: float) -> None:
        if self._poll.poll(timeout_s * 1000):
            with suppress(BlockingIOError):
                if not self._socket.recv(4096):
                    raise ConnectionResetError("the other end of the window closed")

    def close(self) -> None:
        self._socket.close()


class ListeningDoorbell:
    """The drive's side of a `SocketDoorbell`: a Unix socket; the most recently connected host is used.

    Hosts without a doorbell (behind a block device) are served by polling.
    """

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        with _address(path) as address:
            self._listener.bind(address)
        path.chmod(0o600)
        self._listener.listen(4)
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)
        self._host: socket.socket | None = None
        self._polling = Polling(max_s=0.01)

    def ring(self) -> None:
        self._polling.ring()
        if self._host:
            with suppress(OSError):
                self._host.send(b"!", socket.MSG_NOSIGNAL)

    def wait(self, timeout_s: float) -> None:
        if not self._host:
            self._polling.wait(timeout_s)
            timeout_s = 0
        for fd, _ in self._poll.poll(timeout_s * 1000):
            if fd == self._listener.fileno():
                self._hang_up()
                self._host = self._listener.accept()[0]
                self._host.setblocking(False)
                self._poll.register(self._host, select.POLLIN)
            else:
                self._heard()

    def close(self) -> None:
        self._hang_up()
        self._listener.close()

    def _heard(self) -> None:
        assert self._host is not None
        try:
            if self._host.recv(4096):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._hang_up()

    def _hang_up(self) -> None:
        if self._host:
            self._poll.unregister(self._host)
            self._host.close()
            self._host = None
