"""Host side of one TCP connection: a queue of the initiator in user space."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from csd_link.nvmeof.commands import DO_NOT_RETRY, SGL_IN_CAPSULE, SGL_TRANSPORT, Admin, Cqe, Fabrics, Sqe
from csd_link.nvmeof.controllers import ConnectData
from csd_link.nvmeof.pdu import (
    FROM_CONTROLLER,
    R2T,
    Buffer,
    Data,
    Digests,
    Fes,
    Flag,
    IcReq,
    IcResp,
    PduError,
    PduHeader,
    PduType,
    Term,
    pack,
    pack_data,
    pack_ic,
    pack_term,
    part_of,
)
from csd_link.nvmeof.stream import ConnectionClosedError, PduStream
from csd_link.nvmeof.target import resolve
from csd_link.nvmeof.tls import Credentials, TlsError, TlsLine, words

CONTROLLER_TIMEOUT_S = 60.0  # without a PDU, while a command is in flight
PDU_S = 10.0  # to complete a PDU that has begun; if bytes are lost, it never completes
CONNECT_S = 5.0
_CONNECT_CAPSULE_BYTES = 8192  # of the admin queue, and of a Connect command
_NO_FLOW_CONTROL = 1 << 18  # CATTR bit 2 in CDW11
_MAX_ALIGN = 31
_CIDS = 1 << 16


class ControllerTimeoutError(ConnectionClosedError):
    """Nothing was received from the controller for CONTROLLER_TIMEOUT_S."""


class StatusError(Exception):
    """A command completed with a status other than success; `status` has no DO_NOT_RETRY bit."""

    def __init__(self, status: int, result: int) -> None:
        super().__init__(f"NVMe status {status:#05x}, result {result:#x}")
        self.status, self.result = status, result


class Reply(NamedTuple):
    """A completed command.

    Attributes:
        status: NVMe status without DO_NOT_RETRY.
        data: Received data, or the memory passed to `begin`.
        context: Value passed to `begin`.
    """

    cid: int
    status: int
    result: int
    data: bytearray | memoryview
    context: Any


@dataclass(slots=True)
class _InFlightCommand:
    """A command in flight. out: data to the controller; most, got: bytes expected at most, and received."""

    out: Sequence[Buffer]
    most: int
    context: Any
    into: bytearray | memoryview | None  # buffer for received data; allocated when its size is known
    got: int = 0

    @property
    def data(self) -> bytearray | memoryview:
        """Received data, in its buffer."""
        if isinstance(self.into, bytearray):
            del self.into[self.got :]
        return bytearray() if self.into is None else self.into


class HostQueue:
    """Queue of commands to a controller. One thread at a time prepares commands, and one waits for completions."""

    def __init__(self, host: str, port: int, digests: Digests = Digests(), tls: Credentials | None = None) -> None:
        """Connect and negotiate digests.

        Args:
            tls: CA of the controller, and this host's certificate if the controller requires one; None for no TLS.

        Raises:
            OSError: No NVMe/TCP controller answers.
            TlsError: One side does not accept the other's certificate.
        """
        family, address = resolve(host, port)
        with ExitStack() as undo:
            line = socket.socket(family, socket.SOCK_STREAM)
            undo.callback(line.close)
            try:
                line.settimeout(CONNECT_S)
                line.connect(address)
                line.settimeout(None)
                secured = tls and TlsLine(line, tls.client(), host)
                self._stream = PduStream(secured or line, frozenset({PduType.IC_RESP}), CONNECT_S)
                if secured:
                    secured.handshake(time.monotonic() + CONNECT_S)
                self._align = self._initialize(digests)
            except PduError as error:
                raise ConnectionClosedError(f"{host}:{port} is no NVMe/TCP controller: {error}") from error
            except (TlsError, ssl.SSLError) as error:
                raise TlsError(
                    f"{host}:{port}: {words(error) if isinstance(error, ssl.SSLError) else error}"
                ) from error
            except (ConnectionClosedError, TimeoutError) as error:
                raise ConnectionClosedError(
                    f"{host}:{port}: {error}" + (not tls) * "; if it needs TLS, add ?tls=FILE"
                ) from error
            except OSError as error:
                raise OSError(error.errno, f"{host}:{port}: {error.strerror or error}") from error
            undo.pop_all()
        self.in_capsule_bytes = _CONNECT_CAPSULE_BYTES
        self._out: list[Buffer] = []
        self._begun: dict[int, _InFlightCommand] = {}
        self._cids = 0
        self._since = time.perf_counter()
        self._sending = threading.Lock()

    def _initialize(self, digests: Digests) -> int:
        """Exchange the first PDUs; returns CPDA."""
        stream = self._stream
        stream.send([pack_ic(IcReq(digests=digests))])
        _, answer = stream.receive()
        assert isinstance(answer, IcResp)
        if answer.version or answer.digests != digests or answer.align > _MAX_ALIGN or answer.max_h2c_bytes < 4096:
            raise PduError(Fes.UNSUPPORTED_PARAMETER, 8, f"it answers {answer}")
        stream.digests, stream.allowed = digests, FROM_CONTROLLER - {PduType.IC_RESP}
        stream.set_patience(PDU_S, CONTROLLER_TIMEOUT_S)
        stream.on_idle = self._check_alive
        self._max_h2c_bytes, stream.max_data_bytes = answer.max_h2c_bytes, 1 << 32
        return answer.align

    def connect(self, data: ConnectData, queue: int, entries: int, keep_alive_ms: int = 0) -> int:
        """Connect to a controller without flow control; returns its ID. Raises StatusError."""
        sqe = Sqe(
            Admin.FABRICS,
            nsid=Fabrics.CONNECT,
            cdw10=queue << 16,
            cdw11=(entries - 1) | _NO_FLOW_CONTROL,
            cdw12=keep_alive_ms,
        )
        return self.command(sqe, [data.pack()]).result & 0xFFFF

    def command(self, sqe: Sqe, data: Sequence[Buffer] = (), receive_bytes: int = 0) -> Reply:
        """Execute a command while no other is in flight; see `begin`. Raises StatusError."""
        self.begin(sqe, data, receive_bytes)
        self.flush()
        reply = self.next()
        if reply.status:
            raise StatusError(reply.status, reply.result)
        return reply

    def begin(
        self,
        sqe: Sqe,
        data: Sequence[Buffer] = (),
        receive_bytes: int = 0,
        context: Any = None,
        into: memoryview | None = None,
    ) -> int:
        """Prepare a command, which `flush` sends; returns its command ID.

        Args:
            sqe: Its entry, without command ID and SGL descriptor.
            data: Data to the controller (zero-copy).
            receive_bytes: Maximum data from the controller.
            context: Returned with the reply.
            into: Memory of `receive_bytes` for that data; None allocates it.
        """
        size, cid = sum(map(len, data)), self._number()
        in_capsule = size <= self.in_capsule_bytes
        entry = sqe.pack_as(cid, size or receive_bytes, SGL_IN_CAPSULE if size and in_capsule else SGL_TRANSPORT)
        self._begun[cid] = _InFlightCommand(data, receive_bytes, context, into)
        sent = data if in_capsule else ()
        capsule = pack(PduType.CAPSULE_CMD, entry, sent, self._stream.digests, 0, self._align)
        with self._sending:
            self._out += capsule
        return cid

    def flush(self) -> None:
        """Send prepared commands; raises OSError if the connection is lost."""
        with self._sending:
            if self._out:
                out, self._out = self._out, []
                self._stream.send(out)

    def next(self) -> Reply:
        """Wait for the next completion; raises OSError if the connection is lost."""
        self._since = time.perf_counter()
        try:
            while True:
                if self._out:
                    self.flush()
                head, pdu = self._stream.receive()
                match pdu:
                    case bytes():
                        return self._end(Cqe.parse(pdu))
                    case Data():
                        if reply := self._take_data(head, pdu):
                            return reply
                    case R2T():
                        self._send_data(pdu)
                    case Term():
                        raise ConnectionClosedError(
                            f"the controller ends the connection: error {pdu.fes}, {pdu.information:#x}"
                        )
        except PduError as error:
            self._stream.send([pack_term(PduType.H2C_TERM, Term(error.fes, error.information))])
            raise ConnectionClosedError(f"the controller breaks the protocol: {error}") from error

    def _check_alive(self) -> None:
        if time.perf_counter() - max(self._since, self._stream.heard) > CONTROLLER_TIMEOUT_S:
            raise ControllerTimeoutError(f"nothing received from the controller for {CONTROLLER_TIMEOUT_S:g} s")

    def shut(self) -> None:
        """Shut the connection down, from any thread."""
        self._stream.shut()

    def close(self) -> None:
        """Release the socket."""
        self._stream.close()

    def detach(self) -> socket.socket:
        """Return the connection as a socket, which the caller then owns; no command may be in flight."""
        assert isinstance(self._stream.line, socket.socket), "a connection without TLS"
        return self._stream.line

    def _number(self) -> int:
        assert len(self._begun) < _CIDS, "all command IDs are in flight"
        while self._cids in self._begun:
            self._cids = (self._cids + 1) % _CIDS
        cid, self._cids = self._cids, (self._cids + 1) % _CIDS
        return cid

    def _of(self, cid: int) -> _InFlightCommand:
        begun = self._begun.get(cid)
        if begun is None:
            raise PduError(Fes.INVALID_HEADER_FIELD, 8, f"command {cid} is not in flight")
        return begun

    def _take_data(self, head: PduHeader, pdu: Data) -> Reply | None:
        cid, _, offset, length = pdu
        begun = self._of(cid)
        end, is_last = offset + length, bool(head.flags & (Flag.LAST | Flag.SUCCESS))
        if length != head.data_bytes or offset != begun.got or end > begun.most:
            raise PduError(Fes.DATA_OUT_OF_RANGE, 12, f"data of command {cid} at {offset}")
        if begun.into is None:
            begun.into = bytearray(end if is_last else begun.most)
        if not self._stream.read(memoryview(begun.into)[offset:end]):
            raise ConnectionClosedError("data of the controller does not match its digest")
        begun.got = end
        if not head.flags & Flag.SUCCESS:
            return None
        del self._begun[cid]
        return Reply(cid, 0, 0, begun.data, begun.context)

    def _send_data(self, pdu: R2T) -> None:
        """Send the requested data, in parts of at most MAXH2CDATA."""
        out, end = self._of(pdu.cid).out, pdu.offset + pdu.length
        if end > sum(map(len, out)):
            raise PduError(Fes.DATA_OUT_OF_RANGE, 12, f"the controller asks for byte {end}")
        for at in range(pdu.offset, end, self._max_h2c_bytes):
            length = min(self._max_h2c_bytes, end - at)
            header = pack_data(Data(pdu.cid, pdu.tag, at, length))
            flags = Flag.LAST if at + length == end else 0
            part = part_of(out, at, length)
            with self._sending:
                self._stream.send(pack(PduType.H2C_DATA, header, part, self._stream.digests, flags, self._align))

    def _end(self, cqe: Cqe) -> Reply:
        begun = self._of(cqe.cid)
        del self._begun[cqe.cid]
        return Reply(cqe.cid, cqe.status & ~DO_NOT_RETRY, cqe.result, begun.data, begun.context)
