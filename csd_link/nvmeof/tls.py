"""TLS 1.3 with certificates for the NVMe/TCP host and controller, based on Python's ssl module."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from csd_link.nvmeof.pdu import Buffer

_PIECE_BYTES = 1 << 18  # encrypted at once
_LINGER_S = 1.0  # for the peer to read the reason of a rejection
_REFUSED_CERTIFICATE = ("UNKNOWN_CA", "BAD_CERTIFICATE", "CERTIFICATE_EXPIRED", "CERTIFICATE_UNKNOWN")


class TlsError(ConnectionError):
    """A certificate or a key is missing, or one side does not accept the other."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Names of files in PEM format; an empty name for no file.

    Attributes:
        cert: This side's certificate, with intermediate ones after it.
        key: Its private key, not encrypted.
        ca: Certificates that the peer's certificate must be signed by.

    """

    cert: str = ""
    key: str = ""
    ca: str = ""

    def server(self) -> ssl.SSLContext:
        """Context of a controller; with a CA, hosts need a certificate. Raises TlsError."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # connections are not resumed
        if self.ca:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client(self) -> ssl.SSLContext:
        """Context of a host, which checks that the controller's certificate names its address. Raises TlsError."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            for name in filter(None, (self.cert, self.key, self.ca)):
                with open(name, "rb"):
                    pass  # ssl errors have no file name
            if self.cert:
                context.load_cert_chain(self.cert, self.key or None, password=lambda: b"")
            if self.ca:
                context.load_verify_locations(self.ca)
        except ssl.SSLError as error:
            files = ", ".join(filter(None, (self.cert, self.key, self.ca)))
            reason = (error.reason or "not in PEM format, or encrypted").lower().replace("_", " ")
            raise TlsError(f"TLS files {files}: {reason}: give certificates and an unencrypted key in PEM") from error
        except OSError as error:
            raise TlsError(f"TLS file {error.filename}: {error.strerror}") from error
        return context


class TlsLine:
    """A TCP connection with TLS, with the methods of a socket that `PduStream` calls.

    One thread may receive while another sends. Timeouts of the socket apply, so receiving raises BlockingIOError if no
    complete record has arrived.
    """

    def __init__(self, line: socket.socket, context: ssl.SSLContext, peer: str | None = None) -> None:
        """Args:
        line: A connected socket; this owns it.
        context: Certificates and rules of this side.
        peer: Name or address that the controller's certificate must have; None on the controller's side.
        """
        self._line, self._lock = line, threading.Lock()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=peer is None, server_hostname=peer)
        self._unsent, self._size = memoryview(b""), 0  # encrypted bytes, and the size of their plaintext
        self.family, self.close, self.shutdown = line.family, line.close, line.shutdown
        self.setsockopt, self.getsockname, self.getpeername = line.setsockopt, line.getsockname, line.getpeername

    def handshake(self, deadline: float) -> None:
        """Do the handshake before a deadline (time.monotonic); raises TlsError with the reason, or OSError."""
        while True:
            try:
                self._tls.do_handshake()
                self._line.sendall(self._outgoing.read())
                return
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                self._refuse()
                raise TlsError(words(error)) from error
            self._line.sendall(self._outgoing.read())
            if time.monotonic() > deadline:
                raise TimeoutError("the peer has not finished the TLS handshake in time")
            with suppress(BlockingIOError):
                if not self._receive():
                    raise ConnectionError("the peer has closed the connection in the TLS handshake")

    @property
    def nqns(self) -> list[str]:
        """NQNs among the URI subject alternative names of the host's certificate."""
        names: Any = (self._tls.getpeercert() or {}).get("subjectAltName", ())
        return [value for kind, value in names if kind == "URI" and value.startswith("nqn.")]

    def recv_into(self, view: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        """Receive like `socket.recv_into`; an incomplete record counts as no data."""
        for is_last in (False, True):
            with self._lock:
                try:
                    return cast(int, self._tls.read(len(view), view))
                except ssl.SSLWantReadError:
                    pass
            if is_last or not self._receive(flags):
                break
        if self._incoming.eof:
            return 0
        raise BlockingIOError

    def sendmsg(self, parts: Sequence[Buffer], ancillary: tuple[()] = (), flags: int = 0) -> int:
        """Send the beginning of buffers; returns its bytes, 0 until the socket has accepted all of it."""
        if not self._unsent:
            plain, size = list[Buffer](), 0
            for part in parts:
                plain.append(memoryview(part)[: _PIECE_BYTES - size])
                size += len(plain[-1])
            with self._lock:
                self._tls.write(b"".join(plain))
                self._unsent, self._size = memoryview(self._outgoing.read()), size
        self._unsent = self._unsent[self._line.send(self._unsent, flags) :]
        return 0 if self._unsent else self._size

    def _receive(self, flags: int = 0) -> bool:
        """Read encrypted bytes from the socket; returns False at the end."""
        data = self._line.recv(_PIECE_BYTES, flags)
        with self._lock:
            if data:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()
        return bool(data)

    def _refuse(self) -> None:
        """Send an alert with the reason; pending input is read, since a reset would discard the alert."""
        deadline = time.monotonic() + _LINGER_S
        with suppress(OSError):
            self._line.sendall(self._outgoing.read())
            self._line.shutdown(socket.SHUT_WR)
            while time.monotonic() < deadline:
                with suppress(BlockingIOError):
                    if not self._line.recv(_PIECE_BYTES):
                        break


def words(error: ssl.SSLError) -> str:
    """Format a TLS error in one line, with advice for the host if there is some."""

    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate is refused: {error.verify_message}"
    if reason.endswith("CERTIFICATE_REQUIRED"):
        return "it asks for a certificate of this host: add cert=FILE&key=FILE to the options of the address"
    if reason.endswith(_REFUSED_CERTIFICATE):
        return f"it refuses this side's certificate ({reason.lower().replace('_', ' ')})"
    if reason == "WRONG_VERSION_NUMBER":
        return "the peer does not use TLS"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "the host has no certificate"
    return f"TLS: {reason.lower().replace('_', ' ') or error}"
