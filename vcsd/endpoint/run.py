"""Sockets of the endpoint, and its HTTP server until a signal."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from csd_spec.optional import require

if TYPE_CHECKING:
    from vcsd.endpoint.app import ModelEndpoint

GRACE_S = 5  # time for running requests after a signal
LOOPBACK = "localhost"


def require_packages() -> None:
    """Raise MissingExtraError if a package of the endpoint is not installed."""
    require("the endpoint", "endpoint", "starlette", "uvicorn", "prometheus_client")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host name or address."""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host == LOOPBACK


def check_key_for(host: str, key: str | None) -> None:
    """Raise ValueError if an address needs a key, or the key cannot be sent in a header."""
    if key is not None and not (key.isascii() and key.isprintable() and key == key.strip() and key):
        raise ValueError("--api-key: must be printable ASCII characters, without spaces at the ends")
    if key is None and not is_loopback(host):
        raise ValueError(f"--host {host}: other machines reach it: set VCSD_API_KEY, or add --api-key KEY")


def listen(host: str, port: int) -> socket.socket:
    """Open the listening socket.

    Raises:
        ValueError: The address is in use, or not one of this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, ValueError) as error:
        code = getattr(error, "errno", None)
        reason = os.strerror(code) if code and code > 0 else str(error)  # codes of getaddrinfo are negative
        raise ValueError(f"--host {host} --port {port}: {reason}: choose another address or port") from error


def url_of(listening: socket.socket) -> str:
    """URL of the API at a socket."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def http_server(endpoint: ModelEndpoint) -> Any:
    """The HTTP server of an endpoint; `run(sockets=[...])` serves until SIGINT, SIGTERM or `should_exit`.

    Requests have `GRACE_S` to end, after a second signal no time. Then they are cancelled, and their clients read an
    error.
    """
    import uvicorn

    class SignalledServer(uvicorn.Server):
        """Ends at a signal without raising it again, so that the model's server is closed in order."""

        should_exit: bool

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            if threading.current_thread() is not threading.main_thread():
                yield
                return
            loop = asyncio.get_running_loop()

            def end(*_: object) -> None:
                if self.should_exit:
                    loop.call_soon_threadsafe(endpoint.cancel)
                self.should_exit = True

            before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            timer = asyncio.get_running_loop().call_later(GRACE_S, endpoint.cancel)
            await super().shutdown(sockets)
            timer.cancel()

    options: dict[str, Any] = {"loop": "asyncio", "http": "h11", "ws": "none", "lifespan": "off"}
    options |= {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": 2 * GRACE_S}
    return SignalledServer(uvicorn.Config(endpoint.app(), **options))
