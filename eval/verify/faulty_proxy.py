"""TCP proxy that cuts connections, delays bytes, and damages them, at points drawn from a seed."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

FAULTS = ("cut", "delay", "drop", "double", "flip")
MAX_DELAY_S = 0.2
_MAX_BYTES = 64  # dropped or duplicated at once


class FaultyProxy:
    """Forwards bytes between hosts and a local port; injects faults while `is_active` is set.

    faults: injected faults by kind. most_bytes: maximum between two faults; the mean is half of it.
    """

    def __init__(self, port: int, draw: random.Random, most_bytes: int, kinds: tuple[str, ...] = FAULTS) -> None:
        self._target, self._draw, self._most, self._kinds = port, draw, most_bytes, kinds
        self._lock, self._left = threading.Lock(), draw.randrange(most_bytes)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.faults = dict.fromkeys(FAULTS, 0)
        self.is_active = False
        self._threads, self._lines = list[threading.Thread](), list[socket.socket]()
        self._start(self._accept)

    @property
    def count(self) -> int:
        """Faults so far."""
        return sum(self.faults.values())

    def close(self) -> None:
        """End all connections, and wait for the threads."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        _shut(self._lines)
        for thread in self._threads:
            thread.join()
        self._listener.close()
        for line in self._lines:
            line.close()

    def _start(self, run: Callable[..., None], *args: socket.socket) -> None:
        self._threads.append(threading.Thread(target=run, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                host, _ = self._listener.accept()
            except OSError:
                return
            try:
                drive = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                host.close()
                continue
            for line in (host, drive):
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._lines += [host, drive]
            self._start(self._pass, host, drive)
            self._start(self._pass, drive, host)

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                fault = self._drawn(len(data))
                if fault:
                    at, size = self._draw.randrange(len(data)), self._draw.randint(1, _MAX_BYTES)
                    data = _harmed(data, fault, at, size)
                    if fault == "delay":
                        time.sleep(self._draw.random() * MAX_DELAY_S)
                sink.sendall(data)
                if fault == "cut":
                    break
        _shut([source, sink])

    def _drawn(self, size: int) -> str:
        """Draw the fault of a piece of `size` bytes; empty for most pieces."""
        with self._lock:
            self._left -= size
            if not self.is_active or self._left > 0:
                return ""
            self._left = self._draw.randrange(self._most)
            kind = self._draw.choice(self._kinds)
            self.faults[kind] += 1
            return kind


def _harmed(data: bytes, fault: str, at: int, size: int) -> bytes:
    match fault:
        case "cut":
            return data[:at]
        case "drop":
            return data[:at] + data[at + size :]
        case "double":
            return data[: at + size] + data[at:]
        case "flip":
            return data[:at] + bytes([data[at] ^ 1 << size % 8]) + data[at + 1 :]
    return data


def _shut(lines: list[socket.socket]) -> None:
    for line in lines:
        with suppress(OSError):  # it is closed already
            line.shutdown(socket.SHUT_RDWR)
