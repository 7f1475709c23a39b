"""NVMe/TCP target: listens for hosts of one subsystem, and serves each connection in its own thread."""

from __future__ import annotations

import ipaddress
import os
import socket
import threading

from csd_link.nvmeof.connection import Connection
from csd_link.nvmeof.controllers import Controllers
from csd_link.nvmeof.identify import Limits
from csd_link.nvmeof.subsystem import Subsystem
from csd_link.nvmeof.tls import Credentials, TlsLine

_BACKLOG = 64
DEFAULT_PORT = 4420


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Resolve family and address to listen at or to connect to; raises OSError with the host's name."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise OSError(f"{host}:{port}: {getattr(error, 'strerror', None) or error}") from error
    return family, (str(address[0]), int(address[1]))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener at this address."""
    return ipaddress.ip_address(resolve(host, 0)[1][0]).is_loopback


class Target:
    """Serves a subsystem at a TCP address until it is stopped."""

    def __init__(
        self, subsystem: Subsystem, host: str, port: int, limits: Limits = Limits(), tls: Credentials | None = None
    ) -> None:
        """Listen; raises OSError on failure.

        Args:
            port: Port; 0 uses any free one.
            tls: Certificate and key if TLS is required.
        """
        self._tls = tls and tls.server()
        family, address = resolve(host, port)
        try:
            self._listener = socket.create_server(address, family=family, backlog=_BACKLOG)
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), f"{host}:{port}") from error
        self.port: int = self._listener.getsockname()[1]
        self.controllers = Controllers(subsystem, limits)
        self._lock = threading.Lock()
        self._connections: dict[Connection, threading.Thread] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._accept, daemon=True)

    @property
    def connections(self) -> int:
        """Current number of TCP connections."""
        return len(self._connections)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish the current commands and close all connections."""
        self._stopping = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._lock:
            left = dict(self._connections)
        for connection in left:
            connection.stream.shut()
        for thread in left.values():
            thread.join()

    def _accept(self) -> None:
        while not self._stopping:
            try:
                line, _ = self._listener.accept()
            except OSError:
                continue  # closed, or the host has disconnected
            with self._lock:
                limits = self.controllers.limits
                if len(self._connections) >= limits.connections:
                    line.close()
                    continue
                unnamed = [connection for connection in self._connections if not connection.is_named]
                if len(unnamed) >= limits.unnamed_connections:  # the oldest one makes room, if possible a silent one
                    min(unnamed, key=lambda connection: connection.has_spoken).stream.shut()
                try:
                    wrapped = TlsLine(line, self._tls) if self._tls else line
                    connection = Connection(wrapped, self.controllers)
                except OSError:  # the host has disconnected
                    line.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
                self._connections[connection] = thread
                thread.start()

    def _serve(self, connection: Connection) -> None:
        try:
            connection.run()
        finally:
            with self._lock:
                del self._connections[connection]
