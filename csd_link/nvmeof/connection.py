"""Controller side of one TCP connection: a queue, its commands and their data."""

from __future__ import annotations

import socket
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from csd_link.nvmeof.commands import (
    ALL_NAMESPACES,
    DO_NOT_RETRY,
    RETRIED,
    SGL_IN_CAPSULE,
    SGL_TRANSPORT,
    Admin,
    Answer,
    Code,
    CommandError,
    Cqe,
    Csi,
    Fabrics,
    Sqe,
    words,
)
from csd_link.nvmeof.controller import Controller
from csd_link.nvmeof.controllers import CONNECT_DATA_BYTES, ConnectData, Controllers, Host
from csd_link.nvmeof.fields import ADMIN, check_fields
from csd_link.nvmeof.pdu import (
    FROM_HOST,
    R2T,
    Buffer,
    Data,
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
)
from csd_link.nvmeof.stream import MIN_BYTES_PER_S, ConnectionClosedError, PduStream
from csd_link.nvmeof.subsystem import Address, NvmeNamespace
from csd_link.nvmeof.tls import TlsError, TlsLine

MAX_H2C_BYTES = 1 << 23  # maximum data of an H2CData PDU
_ADMIN_CAPSULE_BYTES = 8192  # of the admin queue, by the specification
_SEND_BYTES = 1 << 20  # responses are coalesced up to this size while more commands are ready to be read
_MAX_ALIGN = 31
_NO_FLOW_CONTROL = 1 << 2
_FLUSH = 0x00
_NO_DATA = memoryview(b"")


@dataclass(slots=True)
class DataTransfer:
    """A command whose data is transferred by R2T; `data` is set once it is requested."""

    sqe: Sqe
    size: int
    tag: int
    data: memoryview = _NO_DATA
    received: int = 0
    is_good: bool = True
    deadline: float = 0.0


class Connection:
    """Serves one connection until it closes, in the thread that calls `run`."""

    def __init__(self, line: socket.socket | TlsLine, controllers: Controllers) -> None:
        self._controllers, self._limits = controllers, controllers.limits
        self.stream = PduStream(line, frozenset({PduType.IC_REQ}), self._limits.pdu_s)
        self._controller: Controller | None = None
        self.has_spoken = False
        self._queue = self._entries = self._sq_head = self._align = self._tags = 0
        self._flow_control = True
        self._nqns: list[str] = []  # NQNs that the host's certificate allows; empty for any
        self._out: list[Buffer] = []
        self._out_bytes = 0
        self._transfers: deque[DataTransfer] = deque()  # only the data of the first is requested

    @property
    def is_named(self) -> bool:
        """Whether the host is known: it has connected to a controller."""
        return self._controller is not None

    def run(self) -> None:
        """Serve the host until it disconnects, violates the protocol, or is too slow."""
        raw = b""
        try:
            self._initialize()
            while True:
                if self._out and not self.stream.pending:
                    self._send()
                head, pdu = self.stream.receive()
                raw = head.raw
                if head.kind is PduType.H2C_TERM:
                    return
                self._take(head, pdu)
                self.stream.on_idle()  # a host that is never idle has the same limits
        except PduError as error:
            with suppress(OSError):
                self.stream.send([pack_term(PduType.C2H_TERM, Term(error.fes, error.information, raw))])
        except OSError:
            pass  # closed by the host, or because it was too slow
        finally:
            if self._controller:
                for transfer in self._transfers:
                    self._controllers.release_bytes(self._controller.owner, len(transfer.data))
                self._controllers.disconnect(self._controller, self._queue)
            self.stream.close()

    def _initialize(self) -> None:
        deadline = time.monotonic() + self._limits.handshake_s

        def check_deadline() -> None:
            if time.monotonic() > deadline:
                raise ConnectionClosedError("the host has not connected to a controller")

        self.stream.on_idle = check_deadline
        if isinstance(self.stream.line, TlsLine):
            self._handshake(self.stream.line, deadline)
        _, request = self.stream.receive()
        assert isinstance(request, IcReq)
        self.has_spoken = True
        if request.version:
            raise PduError(Fes.UNSUPPORTED_PARAMETER, 8, f"PFV = {request.version}: this is version 0")
        if request.align > _MAX_ALIGN:
            raise PduError(Fes.INVALID_HEADER_FIELD, 10, f"HPDA = {request.align}: at most {_MAX_ALIGN}")
        self._align = request.align
        self.stream.send([pack_ic(IcResp(digests=request.digests, max_h2c_bytes=MAX_H2C_BYTES))])
        self.stream.digests, self.stream.allowed = request.digests, FROM_HOST - {PduType.IC_REQ}
        self.stream.max_data_bytes = _ADMIN_CAPSULE_BYTES

    def _handshake(self, line: TlsLine, deadline: float) -> None:
        try:
            line.handshake(deadline)
        except (TlsError, TimeoutError) as error:
            self._controllers.subsystem.refuse_host(f"a host is refused before its name is known: {error}")
            raise
        self._nqns = line.nqns

    def _take(self, head: PduHeader, pdu: object) -> None:
        if not isinstance(pdu, bytes):
            assert isinstance(pdu, Data)
            self._take_data(head, pdu)
            return
        sqe = Sqe.parse(pdu)
        limit = self._limits.in_capsule_bytes if self._queue else _ADMIN_CAPSULE_BYTES
        if head.data_bytes > limit:
            raise PduError(Fes.DATA_LIMIT_EXCEEDED, 4, f"{head.data_bytes} bytes in a capsule: at most {limit}")
        data = _NO_DATA
        try:
            if head.data_bytes:
                data = memoryview(bytearray(head.data_bytes))
                if not self.stream.read(data):
                    raise CommandError(Code.TRANSIENT)
            size = self._data_bytes(sqe)
            if sqe.sgl_bytes < size:
                raise CommandError(Code.SGL_LENGTH)
            if sqe.to_controller and size:
                if sqe.sgl_type == SGL_TRANSPORT:
                    self._ask(sqe, size)
                    return
                data = _in_capsule(sqe, data)[:size]
            if size > self._limits.in_capsule_bytes:
                with self._controllers.reserve_bytes(self._owner, size):
                    self._execute(sqe, data)
                    self._send()
            else:
                self._execute(sqe, data)
        except CommandError as error:
            self._refuse(sqe, error)

    def _data_bytes(self, sqe: Sqe) -> int:
        """Bytes that a command transfers; raises CommandError for an unknown command."""
        if sqe.opcode == Admin.FABRICS:
            check_fields(sqe, ADMIN)
            return CONNECT_DATA_BYTES if sqe.fabrics_type == Fabrics.CONNECT else 0
        if self._controller is None:
            raise CommandError(Code.SEQUENCE_ERROR)
        if not self._queue:
            check_fields(sqe, ADMIN)
            return 0
        namespace = self._namespace(sqe)
        if sqe.opcode not in namespace.effects:
            raise CommandError(Code.INVALID_OPCODE)
        check_fields(sqe, namespace.csi)
        size = namespace.data_bytes(sqe)
        if size > self._limits.transfer_bytes:
            raise CommandError(Code.INVALID_FIELD)
        return size

    @property
    def _owner(self) -> Host:
        assert self._controller is not None
        return self._controller.owner

    def _namespace(self, sqe: Sqe) -> NvmeNamespace:
        assert self._controller is not None
        nsid = sqe.nsid
        if nsid == ALL_NAMESPACES and sqe.opcode == _FLUSH:
            nsid = next(iter(self._controller.subsystem.with_set(Csi.NVM)), nsid)
        return self._controller.namespace(nsid)

    def _execute(self, sqe: Sqe, data: Buffer) -> None:
        """Execute a command whose data has arrived, and queue its response."""
        answer: Answer | None
        if sqe.opcode == Admin.FABRICS:
            answer = self._fabrics(sqe, data)
        elif not self._queue:
            assert self._controller is not None
            answer = self._controller.admin(sqe)
        else:
            answer = self._io(sqe, data)
        if answer is not None:
            self._complete(sqe, answer)

    def _io(self, sqe: Sqe, data: Buffer) -> Answer:
        assert self._controller is not None
        if not self._controller.is_ready:
            raise CommandError(Code.SEQUENCE_ERROR)
        namespace = self._namespace(sqe)
        try:
            return namespace.execute(sqe, data, self._controller.host[1])
        except CommandError:
            raise
        except Exception:  # noqa: BLE001 - a bug of a namespace ends no connection
            raise CommandError(Code.INTERNAL_ERROR) from None

    def _complete(self, sqe: Sqe, answer: Answer) -> None:
        data, digests = answer.data, self.stream.digests
        size = sum(map(len, data))
        if size > sqe.sgl_bytes:
            data = (b"".join(data)[: sqe.sgl_bytes],)
            size = sqe.sgl_bytes
        no_capsule = size > 0 and not answer.result and not self._flow_control
        if size:
            flags = Flag.LAST | (Flag.SUCCESS if no_capsule else 0)
            header = pack_data(Data(sqe.cid, 0, 0, size))
            self._out += pack(PduType.C2H_DATA, header, data, digests, flags, self._align)
            self._out_bytes += size
        self._sq_head = (self._sq_head + 1) % max(1, self._entries)
        if not no_capsule:
            self._respond(sqe.cid, answer.result, Code.SUCCESS)
        if self._out_bytes > _SEND_BYTES:
            self._send()

    def _refuse(self, sqe: Sqe, error: CommandError) -> None:
        status = error.status if error.status in RETRIED else error.status | DO_NOT_RETRY
        self._controllers.subsystem.note(self._queue, sqe.cid, status, sqe.nsid)
        self._sq_head = (self._sq_head + 1) % max(1, self._entries)
        self._respond(sqe.cid, error.dw0, status)

    def _respond(self, cid: int, result: int, status: int) -> None:
        cqe = Cqe(result, self._sq_head, self._queue, cid, status).pack()
        self._out += pack(PduType.CAPSULE_RESP, cqe, (), self.stream.digests)

    def _send(self) -> None:
        out, self._out, self._out_bytes = self._out, [], 0
        self.stream.send(out)

    def _fabrics(self, sqe: Sqe, data: Buffer) -> Answer:
        if sqe.fabrics_type == Fabrics.CONNECT:
            return self._connect(sqe, bytes(data))
        if self._controller is None or self._queue:
            raise CommandError(Code.SEQUENCE_ERROR)
        if sqe.fabrics_type == Fabrics.PROPERTY_GET:
            return Answer(result=self._controller.get_property(sqe.cdw11, bool(sqe.cdw10 & 7)))
        if sqe.fabrics_type == Fabrics.PROPERTY_SET:
            self._controller.set_property(sqe.cdw11, words(sqe.cdw12, sqe.cdw13))
            return Answer()
        raise CommandError(Code.INVALID_OPCODE)

    def _connect(self, sqe: Sqe, data: bytes) -> Answer:
        if self._controller is not None:
            raise CommandError(Code.SEQUENCE_ERROR)
        version, queue, entries = sqe.cdw10 & 0xFFFF, sqe.cdw10 >> 16, (sqe.cdw11 & 0xFFFF) + 1
        if version:
            raise CommandError(Code.CONNECT_FORMAT)
        if not 2 <= entries <= self._limits.queue_entries:
            raise CommandError(Code.CONNECT_PARAMETERS, 44)
        connect_data = ConnectData.parse(data)
        if self._nqns and connect_data.hostnqn not in self._nqns:
            self._controllers.subsystem.refuse_host(
                f"host {connect_data.hostnqn!r} has a certificate of {', '.join(self._nqns)}: "
                "it must connect by that name"
            )
            raise CommandError(Code.INVALID_HOST)
        if queue:
            controller = self._controllers.join(connect_data, queue, self.stream.shut)
            self.stream.on_idle = self._check_transfer
            self.stream.max_data_bytes = max(self._limits.in_capsule_bytes, MAX_H2C_BYTES)
        else:
            controller = self._controllers.create(connect_data, _peer(self.stream.line), self.stream.shut)
            controller.features.keep_alive_ms = sqe.cdw12
            controller.address = _address(self.stream.line)
            controller.complete_event = self._respond
            self.stream.on_idle = self._check_alive
        self._controller, self._queue, self._entries = controller, queue, entries
        self._flow_control = not sqe.cdw11 >> 16 & _NO_FLOW_CONTROL
        return Answer(result=controller.cntlid)

    def _check_alive(self) -> None:
        assert self._controller is not None
        if self._controller.expired:
            raise ConnectionClosedError("no sign of the host in its keep alive timeout")
        self._check_transfer()

    def _ask(self, sqe: Sqe, size: int) -> None:
        """Request a command's data, after the data of earlier commands."""
        if len(self._transfers) >= self._limits.queue_entries:
            raise CommandError(Code.INTERRUPTED)
        self._tags = (self._tags + 1) & 0xFFFF
        self._transfers.append(DataTransfer(sqe, size, self._tags))
        if len(self._transfers) == 1:
            self._ask_first()

    def _ask_first(self) -> None:
        """Request the data of the first transfer that fits the in-flight limit."""
        while self._transfers:
            first = self._transfers[0]
            try:
                self._controllers.acquire_bytes(self._owner, first.size)
            except CommandError as error:
                self._transfers.popleft()
                self._refuse(first.sqe, error)
                continue
            first.data = np.empty(first.size, np.uint8).data  # not zeroed: it is filled before it is used
            first.deadline = time.monotonic() + self._limits.pdu_s + first.size / MIN_BYTES_PER_S
            request = R2T(first.sqe.cid, first.tag, 0, first.size)
            self._out += pack(PduType.R2T, pack_data(request), (), self.stream.digests)
            return

    def _take_data(self, head: PduHeader, pdu: Data) -> None:
        first = self._transfers[0] if self._transfers else None
        if first is None or (pdu.cid, pdu.tag) != (first.sqe.cid, first.tag):
            raise PduError(Fes.INVALID_HEADER_FIELD, 10, f"H2CData of tag {pdu.tag}, which was not asked for")
        if pdu.length != head.data_bytes:
            raise PduError(Fes.INVALID_HEADER_FIELD, 16, f"DATAL = {pdu.length} of {head.data_bytes} bytes of data")
        end = pdu.offset + pdu.length
        if pdu.offset != first.received or end > first.size or not pdu.length:
            raise PduError(Fes.DATA_OUT_OF_RANGE, 12, f"data at {pdu.offset}: {first.received} was expected")
        first.is_good &= self.stream.read(first.data[pdu.offset : end])
        first.received = end
        if bool(head.flags & Flag.LAST) != (end == first.size):
            raise PduError(Fes.INVALID_HEADER_FIELD, 1, "LAST_PDU does not stand at the end of the data")
        if end < first.size:
            return
        self._transfers.popleft()
        try:
            if not first.is_good:
                raise CommandError(Code.TRANSIENT)
            self._execute(first.sqe, first.data)
        except CommandError as error:
            self._refuse(first.sqe, error)
        finally:
            self._controllers.release_bytes(self._owner, first.size)
        self._ask_first()

    def _check_transfer(self) -> None:
        if self._transfers and time.monotonic() > self._transfers[0].deadline:
            raise ConnectionClosedError("data that was asked for did not come")


def _in_capsule(sqe: Sqe, data: memoryview) -> memoryview:
    """Part of a capsule's data that a command's SGL descriptor selects."""
    if sqe.sgl_type != SGL_IN_CAPSULE:
        raise CommandError(Code.SGL_TYPE)
    if sqe.sgl_address + sqe.sgl_bytes > len(data):
        raise CommandError(Code.SGL_OFFSET)
    return data[sqe.sgl_address : sqe.sgl_address + sqe.sgl_bytes]


def _peer(line: socket.socket | TlsLine) -> str:
    """Address of the host, without its port."""
    return str(line.getpeername()[0]) if line.family in (socket.AF_INET, socket.AF_INET6) else ""


def _address(line: socket.socket | TlsLine) -> Address:
    """Local address of the host's connection."""
    if line.family not in (socket.AF_INET, socket.AF_INET6):
        return Address("", 0, False)
    host, port, *_ = line.getsockname()
    return Address(host, port, line.family == socket.AF_INET6)
