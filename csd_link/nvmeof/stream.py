"""PDU stream over a TCP connection, in both directions, with limits on time and bytes."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from csd_io.crc32c import crc32c
from csd_link.nvmeof.pdu import (
    COMMON,
    DIGEST_BYTES,
    R2T,
    Buffer,
    Data,
    Digests,
    IcReq,
    IcResp,
    PduHeader,
    PduType,
    Term,
    check_header_digest,
    parse,
    parse_head,
)
from csd_link.nvmeof.tls import TlsLine

SPIN_S = 200e-6  # spin time after a PDU: waking a thread takes as long as a command
IDLE_CHECK_S = 0.25  # interval of `on_idle` on an idle connection
_BUFFER_BYTES = 1 << 16
# A machine that is switched off or unreachable sends nothing: its connection is closed after about 10 s
_KEEP_ALIVE = {
    socket.TCP_KEEPIDLE: 4,  # s
    socket.TCP_KEEPINTVL: 2,  # s
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 10_000,  # ms
}
MIN_BYTES_PER_S = 1 << 20  # minimum rate of a peer; assumed
_MAX_PARTS = 512  # per sendmsg; Linux allows 1024

Pdu = IcReq | IcResp | Term | Data | R2T | bytes


class ConnectionClosedError(ConnectionError):
    """The peer has closed the connection, or was disconnected."""


class PduStream:
    """One side of a connection. Small reads are buffered; data is received directly into the caller's memory."""

    def __init__(self, line: socket.socket | TlsLine, allowed: frozenset[PduType], pdu_s: float) -> None:
        """Args:
        line: A connected socket, or TLS over one; the stream owns it.
        allowed: PDU types that are valid to receive.
        pdu_s: Time limit for a PDU that has begun to be received or sent, seconds.
        """
        self.line, self.allowed = line, allowed
        self.digests, self.max_data_bytes = Digests(), 0
        # Called every IDLE_CHECK_S while the peer sends no whole PDU; may raise ConnectionClosedError
        self.on_idle: Callable[[], None] = lambda: None
        self.heard = self._checked = time.perf_counter()  # when bytes came, and `on_idle` was called last, s
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._begin = self._end = 0
        self._spin_until = 0.0  # time.perf_counter(), s
        if line.family != socket.AF_UNIX:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEP_ALIVE.items():
                line.setsockopt(socket.IPPROTO_TCP, option, value)
        self.set_patience(pdu_s, pdu_s)

    def set_patience(self, pdu_s: float, send_s: float) -> None:
        """Change the time limits for receiving and for sending a PDU, seconds."""
        self._pdu_s, self._send_s = pdu_s, send_s
        self.line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(min(IDLE_CHECK_S, pdu_s)))
        self.line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_s))

    @property
    def pending(self) -> bool:
        """Whether the beginning of another PDU is already buffered."""
        return self._end - self._begin >= COMMON.size

    def receive(self) -> tuple[PduHeader, Pdu]:
        """Receive a PDU without its data, which `read` takes; raises PduError, ConnectionClosedError, or OSError."""
        raw = bytes(self._take(COMMON.size, idle=True))
        head = parse_head(raw, self.allowed, self.digests, self.max_data_bytes)
        is_term = head.kind in (PduType.H2C_TERM, PduType.C2H_TERM)
        rest = self._take(head.header_bytes + head.data_bytes * is_term)
        if self.digests.header and not is_term:  # nor the first PDUs, before which none is negotiated
            check_header_digest(head, rest)
        return head, parse(head, rest)

    def read(self, into: memoryview) -> bool:
        """Read all data of the last PDU into memory; returns whether it matches its digest."""
        if not into:
            return True
        got = min(len(into), self._end - self._begin)
        into[:got] = self._buffer[self._begin : self._begin + got]
        self._begin += got
        if got < len(into):
            self._read(into[got:])
        if not self.digests.data:
            return True
        (digest,) = struct.unpack("<I", self._take(DIGEST_BYTES))
        return bool(crc32c(into) == digest)

    def _read(self, into: memoryview) -> None:
        """Read from the connection into memory."""
        got, deadline = 0, time.monotonic() + self._pdu_s + len(into) / MIN_BYTES_PER_S
        while got < len(into):
            more = self._receive_into(into[got:])
            got += more
            self._check()
            if got < len(into) and time.monotonic() > deadline:
                raise ConnectionClosedError(f"{len(into) - got} of {len(into)} bytes of data did not come in time")

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send buffers one after the other; raises ConnectionClosedError if the peer is too slow."""
        left, deadline = sum(map(len, parts)), 0.0
        try:
            while left:
                sent = self.line.sendmsg(parts[:_MAX_PARTS], (), socket.MSG_NOSIGNAL)
                left -= sent
                if left:
                    parts = _after(parts, sent)
                    now = time.monotonic()
                    deadline = deadline or now + self._send_s + left / MIN_BYTES_PER_S
                    if now > deadline:
                        raise ConnectionClosedError(f"the peer takes less than {MIN_BYTES_PER_S} bytes a second")
            self._spin_until = time.perf_counter() + SPIN_S
        except BlockingIOError:
            raise ConnectionClosedError(f"the peer has taken nothing for {self._send_s:g} s") from None

    def shut(self) -> None:
        """Shut the connection down, from any thread; the reading thread gets ConnectionClosedError."""
        with suppress(OSError):  # already closed
            self.line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the socket; only for the reading thread."""
        self.line.close()

    def _take(self, size: int, idle: bool = False) -> memoryview:
        """Return the next bytes, valid until the next read; `idle` allows unlimited waiting for the first byte."""
        if self._end - self._begin < size:
            self._fill(size, idle)
        taken = self._buffer[self._begin : self._begin + size]
        self._begin += size
        return taken

    def _fill(self, size: int, idle: bool) -> None:
        left = self._end - self._begin
        if left:
            self._buffer[:left] = self._buffer[self._begin : self._end]
        self._begin, self._end = 0, left
        deadline = 0.0  # starts when the first bytes are incomplete
        while True:
            got = self._receive_into(self._buffer[self._end :], spins=True)
            self._end += got
            if self._end >= size:
                return
            self._check()
            now = time.monotonic()
            if not deadline or (idle and not self._end):
                deadline = now + self._pdu_s
            elif now > deadline:
                raise ConnectionClosedError(f"a PDU was not complete after {self._pdu_s:g} s")

    def _check(self) -> None:
        """Call `on_idle` if it is time: a peer that sends a byte now and then is not spared."""
        if (now := time.perf_counter()) - self._checked >= IDLE_CHECK_S:
            self._checked = now
            self.on_idle()

    def _receive_into(self, view: memoryview, spins: bool = False) -> int:
        """Receive available bytes; returns 0 if none arrived for a while. Raises ConnectionClosedError at the end.

        Args:
            spins: Poll for SPIN_S before sleeping; not for large transfers, where the peer needs the processor.
        """
        while True:
            is_spinning = spins and time.perf_counter() < self._spin_until
            try:
                got = self.line.recv_into(view, 0, socket.MSG_DONTWAIT if is_spinning else 0)
                break
            except (BlockingIOError, InterruptedError):
                if not is_spinning:
                    return 0
                os.sched_yield()
        if not got:
            raise ConnectionClosedError("the peer has closed the connection")
        self.heard = time.perf_counter()
        self._spin_until = self.heard + SPIN_S
        return got


def _after(parts: Sequence[Buffer], sent: int) -> list[Buffer]:
    """Return the buffers without the first `sent` bytes."""
    rest = list[Buffer]()
    for part in parts:
        if sent < len(part):
            rest.append(memoryview(part)[sent:])
        sent = max(0, sent - len(part))
    return rest


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), max(1, int(seconds % 1 * 1e6)))
