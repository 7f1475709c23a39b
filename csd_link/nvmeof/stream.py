"""PDUs over a TCP connection, in both directions, with limits on time and bytes."""

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
    Head,
    IcReq,
    IcResp,
    PduType,
    Term,
    check_header_digest,
    parse,
    parse_head,
)
from csd_link.nvmeof.tls import TlsLine

SPIN_S = 200e-6  # after the last PDU in which a thread asks without sleeping: to wake it takes as long as a command
LOOK_S = 0.25  # how often a connection on which nothing comes is looked after
_BUFFER_BYTES = 1 << 16
# A machine that is switched off, or cut off, sends nothing more: its connection ends about 10 s later
_KEEP_ALIVE = {
    socket.TCP_KEEPIDLE: 4,  # s
    socket.TCP_KEEPINTVL: 2,  # s
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 10_000,  # ms
}
MIN_BYTES_PER_S = 1 << 20  # of a peer that is served; assumed
_MAX_PARTS = 512  # of one sendmsg; Linux takes 1024

Pdu = IcReq | IcResp | Term | Data | R2T | bytes


class Closed(ConnectionError):
    """The peer has closed the connection, or was dropped."""


class PduStream:
    """One end of a connection. Small reads are joined; data goes straight into the caller's memory."""

    def __init__(self, line: socket.socket | TlsLine, allowed: frozenset[PduType], pdu_s: float) -> None:
        """Args:
        line: A connected socket, or TLS over one; the stream owns it.
        allowed: Types of PDU that may come.
        pdu_s: A PDU that has begun to come, or to go, is to be complete after this many seconds.
        """
        self.line, self.allowed = line, allowed
        self.digests, self.max_data_bytes = Digests(), 0
        self.look: Callable[[], None] = lambda: None  # called while nothing comes; may raise Closed
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
        """Other limits on the time of a PDU that comes, and of one that goes, s."""
        self._pdu_s, self._send_s = pdu_s, send_s
        self.line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(min(LOOK_S, pdu_s)))
        self.line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_s))

    @property
    def pending(self) -> bool:
        """Whether the beginning of another PDU has come already."""
        return self._end - self._begin >= COMMON.size

    def receive(self) -> tuple[Head, Pdu]:
        """The next PDU without its data, which `read` takes; raises PduError, Closed, or OSError."""
        raw = bytes(self._take(COMMON.size, idle=True))
        head = parse_head(raw, self.allowed, self.digests, self.max_data_bytes)
        is_term = head.kind in (PduType.H2C_TERM, PduType.C2H_TERM)
        rest = self._take(head.header_bytes + head.data_bytes * is_term)
        if self.digests.header and head.kind not in (PduType.IC_REQ, PduType.IC_RESP) and not is_term:
            check_header_digest(head, rest)
        return head, parse(head, rest)

    def read(self, into: memoryview) -> bool:
        """Fill memory with all data of the PDU that was received last; whether it matches its digest."""
        if not into:
            return True
        got = min(len(into), self._end - self._begin)
        into[:got] = self._buffer[self._begin : self._begin + got]
        self._begin += got
        if got < len(into):
            self._read(into[got:])
        if not self.digests.data:
            return True
        (found,) = struct.unpack("<I", self._take(DIGEST_BYTES))
        return bool(crc32c(into) == found)

    def _read(self, into: memoryview) -> None:
        """Fill memory from the connection."""
        got, deadline = 0, time.monotonic() + self._pdu_s + len(into) / MIN_BYTES_PER_S
        while got < len(into):
            more = self._receive_into(into[got:])
            got += more
            if not more:
                self.look()
            if got < len(into) and time.monotonic() > deadline:
                raise Closed(f"{len(into) - got} of {len(into)} bytes of data did not come in time")

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send buffers one after the other; raises Closed where the peer takes nothing for too long."""
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
                        raise Closed(f"the peer takes less than {MIN_BYTES_PER_S} bytes a second")
            self._spin_until = time.perf_counter() + SPIN_S
        except BlockingIOError:
            raise Closed(f"the peer has taken nothing for {self._send_s:g} s") from None

    def shut(self) -> None:
        """End the connection from any thread; the thread that reads sees Closed."""
        with suppress(OSError):  # it has ended already
            self.line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the socket; only for the thread that reads."""
        self.line.close()

    def _take(self, size: int, idle: bool = False) -> memoryview:
        """The next bytes, valid until the next read. idle: whether nothing has to come."""
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
        deadline = 0.0  # from the first look on that found too little
        while True:
            got = self._receive_into(self._buffer[self._end :], spins=True)
            self._end += got
            if self._end >= size:
                return
            if not got:
                self.look()
            now = time.monotonic()
            if not deadline or (idle and not self._end):
                deadline = now + self._pdu_s
            elif now > deadline:
                raise Closed(f"a PDU was not complete after {self._pdu_s:g} s")

    def _receive_into(self, view: memoryview, spins: bool = False) -> int:
        """Bytes that have come; 0 when none came for a while. Raises Closed at the end.

        spins: whether to ask for SPIN_S before sleeping; not in large transfers, where the peer needs the processor.
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
            raise Closed("the peer has closed the connection")
        self._spin_until = time.perf_counter() + SPIN_S
        return got


def _after(parts: Sequence[Buffer], sent: int) -> list[Buffer]:
    """The rest of buffers, of which the first bytes were sent."""
    rest = list[Buffer]()
    for part in parts:
        if sent < len(part):
            rest.append(memoryview(part)[sent:])
        sent = max(0, sent - len(part))
    return rest


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), max(1, int(seconds % 1 * 1e6)))
