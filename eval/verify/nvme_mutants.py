"""Connections of a host that keeps to no rule: good PDUs of every state of a connection, and mutations of them."""

from __future__ import annotations

import random
import select
import socket
import struct
import time
import zlib
from contextlib import ExitStack

import numpy as np

from csd_io.crc32c import crc32c
from csd_link.nvmeof.commands import DISCOVERY_NQN, SGL_IN_CAPSULE, SGL_TRANSPORT, Admin, Cqe, Fabrics, Sqe
from csd_link.nvmeof.controllers import ConnectData
from csd_link.nvmeof.host import ENTRIES, host_nqn
from csd_link.nvmeof.host_queue import HostQueue
from csd_link.nvmeof.nvm import LBA_BYTES, Nvm
from csd_link.nvmeof.pdu import (
    COMMON,
    FROM_CONTROLLER,
    HEADER_BYTES,
    Data,
    Digests,
    Flag,
    IcReq,
    PduType,
    Term,
    pack,
    pack_data,
    pack_ic,
    pack_term,
)
from csd_link.nvmeof.sequences import ATTACHED, Op
from csd_link.wire import WireRequest, encode, pack_entry
from csd_spec import KvAppend
from csd_spec.verbs import VERBS
from vcsd_eval.verify.fuzz import ODD, ODD_WIDE, mutated

STATES = ("connected", "initialized", "discovery", "admin", "blocks", "transfer", "sequences")
OWN_LBA = 16  # blocks from here on are the attacker's
_NSIDS = {"blocks": 1, "transfer": 1, "sequences": 3}
_CC_ENABLED = 1 | 6 << 4 | 6 << 16 | 4 << 20
_CHANGES = [bytes([each]) for each in (Nvm.WRITE, Nvm.WRITE_ZEROES, Nvm.DATASET_MANAGEMENT)]
_MUTATED = 0.6  # share of PDUs
_TRANSFER_BYTES = 3 * LBA_BYTES
# No shift of these by some dwords addresses other hosts' blocks: a shifted range is out of range
_RANGES = struct.pack("<IIQ", OWN_LBA, 2, OWN_LBA) * 64
_SUBMIT_BYTES, _PAGE_BYTES, _FETCH_BYTES, _ATTACH_BYTES = 4096, 4096, 1 << 16, 1 << 14


class Attacker:
    """Begins connections as a good host, and draws what follows."""

    def __init__(self, port: int, nqn: str, draw: random.Random) -> None:
        self._port, self._nqn, self._draw, self._name = port, nqn, draw, host_nqn()
        self._host_id = draw.randbytes(16)
        with ExitStack() as undo:
            self._admin = HostQueue("127.0.0.1", port)
            undo.callback(self._admin.close)
            self._cntlid = self._enable(self._admin, nqn)
            undo.pop_all()
        self._corpus = [encode(verb.example((1,), H=2, G=2, d=16)) for verb in VERBS.values()]
        rows = np.ones((20, 2, 16), np.float16)
        self._corpus += [encode(KvAppend((1,), 0, np.array([20]), rows, rows))] * 4

    def close(self) -> None:
        """End the connection that others join."""
        self._admin.close()

    def begin(self, state: str) -> tuple[socket.socket, list[bytes]]:
        """A connection that is in a state, and PDUs that are to follow; raises OSError or StatusError if refused."""
        draw = self._draw
        digests = Digests(draw.random() < 0.25, draw.random() < 0.15)
        if state == "connected":
            line = socket.create_connection(("127.0.0.1", self._port))
            return line, self._changed([pack_ic(IcReq(digests=digests)), *_admin(draw, Digests())], Digests(), state)
        session = 0
        with ExitStack() as undo:
            queue = HostQueue("127.0.0.1", self._port, digests)
            undo.callback(queue.close)
            if state in ("discovery", "admin"):
                self._enable(queue, DISCOVERY_NQN if state == "discovery" else self._nqn)
            elif state in _NSIDS:
                self._join(queue, draw.randint(2, 8))
            if state == "sequences":
                sqe = Sqe(Op.ATTACH, nsid=_NSIDS[state], cdw10=_ATTACH_BYTES)
                session = ATTACHED.unpack_from(queue.command(sqe, (), _ATTACH_BYTES).data)[0]
            undo.pop_all()
        good = {
            "initialized": lambda: [self._connect(digests), *_admin(draw, digests)],
            "discovery": lambda: _admin(draw, digests),
            "admin": lambda: _admin(draw, digests),
            "blocks": lambda: _blocks(draw, digests),
            "transfer": lambda: _transfer(draw, digests),
            "sequences": lambda: self._sequences(session, digests),
        }[state]()
        return queue.detach(), self._changed(good, digests, state)

    def _enable(self, queue: HostQueue, nqn: str) -> int:
        """Make a queue the admin queue of an enabled controller; returns the controller's number."""
        cntlid = queue.connect(ConnectData(self._host_id, 0xFFFF, nqn, self._name), 0, ENTRIES)
        queue.command(Sqe(Admin.FABRICS, nsid=Fabrics.PROPERTY_SET, cdw11=0x14, cdw12=_CC_ENABLED))
        return cntlid

    def _join(self, queue: HostQueue, number: int) -> None:
        """Make a queue an I/O queue of the attacker's controller."""
        queue.connect(ConnectData(self._host_id, self._cntlid, self._nqn, self._name), number, ENTRIES)

    def _connect(self, digests: Digests) -> bytes:
        data = ConnectData(self._host_id, self._draw.choice((0xFFFF, self._cntlid)), self._nqn, self._name).pack()
        queue = self._draw.choice((0, 0, 0, 9))
        sqe = Sqe(Admin.FABRICS, nsid=Fabrics.CONNECT, cdw10=queue << 16, cdw11=ENTRIES - 1)
        return _capsule(sqe, data, digests)

    def _sequences(self, session: int, digests: Digests) -> list[bytes]:
        """Submits and Fetches of a session, with mutated verbs in them."""
        draw, low, pdus = self._draw, 0xFFFFFFFF, []
        for number in range(draw.randint(1, 5)):
            fields = {"nsid": 3, "cdw12": number, "cdw14": session & low, "cdw15": session >> 32}
            request = mutated(self._corpus, [1, 2, 3], draw) if draw.random() < 0.7 else draw.choice(self._corpus)
            body = _entry(request, draw.choice((0, 0, *ODD_WIDE)))[:_SUBMIT_BYTES]
            pdus += [
                _capsule(Sqe(Op.SUBMIT, cdw10=len(body), cdw11=draw.choice((0, 0, 1, 3)), **fields), body, digests),
                _capsule(Sqe(Op.FETCH, cdw10=_FETCH_BYTES, sgl_bytes=_FETCH_BYTES, **fields), b"", digests),
            ]
        return pdus

    def _changed(self, pdus: list[bytes], digests: Digests, state: str) -> list[bytes]:
        """PDUs of which most are mutated, some are sent twice, and some left out."""
        draw, changed = self._draw, []
        for pdu in pdus:
            wanted = _mutated(pdu, digests, draw) if draw.random() < _MUTATED else pdu
            if state in _NSIDS:
                wanted = _own(wanted, pdu, digests)
            changed += [wanted] * draw.choice((0, 1, 1, 1, 1, 1, 1, 2))
        return changed or pdus


def _admin(draw: random.Random, digests: Digests) -> list[bytes]:
    """Commands of an admin queue."""
    read = {"sgl_bytes": _PAGE_BYTES}
    commands = [
        Sqe(Admin.IDENTIFY, nsid=draw.choice((0, 1, 3)), cdw10=draw.choice((0, 1, 2, 3, 5, 6, 8, 0x1C)), **read),
        Sqe(Admin.GET_LOG_PAGE, cdw10=draw.choice((0, 1, 2, 3, 4, 5, 0x70)) | 1023 << 16, **read),
        Sqe(Admin.GET_FEATURES, cdw10=draw.choice((1, 2, 4, 7, 0xB, 0xF, 0x81)) | draw.randrange(4) << 8, **read),
        Sqe(Admin.SET_FEATURES, cdw10=draw.choice((1, 4, 7, 0xB)), cdw11=draw.choice(ODD)),
        Sqe(Admin.KEEP_ALIVE),
        Sqe(Admin.ASYNC_EVENT, cid=draw.randrange(4)),
        Sqe(Admin.ABORT, cdw10=draw.randrange(4) << 16),
        Sqe(Admin.FABRICS, nsid=Fabrics.PROPERTY_GET, cdw11=draw.choice((0, 8, 0x14, 0x1C)), cdw10=draw.randrange(2)),
        Sqe(Admin.FABRICS, nsid=Fabrics.PROPERTY_SET, cdw11=0x14, cdw12=draw.choice((0, 1, _CC_ENABLED, 1 << 14))),
    ]
    chosen = [_capsule(draw.choice(commands), b"", digests) for _ in range(draw.randint(2, 7))]
    if draw.random() < 0.1:
        chosen.append(pack_term(PduType.H2C_TERM, Term(1, 0, chosen[0])))
    return chosen


def _blocks(draw: random.Random, digests: Digests) -> list[bytes]:
    """Commands of the NVM command set, which change blocks of the attacker's own alone."""
    own, any_of = {"nsid": 1, "cdw10": OWN_LBA + draw.randrange(32)}, {"nsid": 1, "cdw10": draw.randrange(64)}
    data = bytes([draw.randrange(256)]) * LBA_BYTES
    choices = [
        (Sqe(Nvm.WRITE, cdw12=draw.choice((0, 1 << 30)), **own), data),
        (Sqe(Nvm.READ, sgl_bytes=2 * LBA_BYTES, cdw12=1, **any_of), b""),
        (Sqe(Nvm.COMPARE, **any_of), data),
        (Sqe(Nvm.WRITE_ZEROES, cdw12=3, **own), b""),
        (Sqe(Nvm.DATASET_MANAGEMENT, nsid=1, cdw10=draw.randrange(64), cdw11=4), _RANGES),
        (Sqe(Nvm.VERIFY, cdw12=7, **any_of), b""),
        (Sqe(Nvm.FLUSH, nsid=draw.choice((1, 0xFFFFFFFF))), b""),
    ]
    return [_capsule(*draw.choice(choices), digests) for _ in range(draw.randint(1, 6))]


def _transfer(draw: random.Random, digests: Digests) -> list[bytes]:
    """A write whose data the controller asks for by R2T, with its data and other commands in between."""
    blocks = _TRANSFER_BYTES // LBA_BYTES
    write = Sqe(Nvm.WRITE, cid=5, nsid=1, cdw10=OWN_LBA, cdw12=blocks - 1, sgl_bytes=_TRANSFER_BYTES)
    pdus, cuts = [_capsule(write, b"", digests)], sorted(draw.sample(range(4, _TRANSFER_BYTES, 4), draw.randint(0, 3)))
    for first, end in zip([0, *cuts], [*cuts, _TRANSFER_BYTES], strict=True):
        data = bytes([draw.randrange(256)]) * (end - first)
        header, flags = pack_data(Data(5, 1, first, len(data))), Flag.LAST if end == _TRANSFER_BYTES else 0
        pdus.append(b"".join(pack(PduType.H2C_DATA, header, [data], digests, flags)))
        if draw.random() < 0.2:
            pdus += _blocks(draw, digests)[:1]
    return pdus


def _capsule(sqe: Sqe, data: bytes, digests: Digests) -> bytes:
    size, kind = (len(data), SGL_IN_CAPSULE) if data else (sqe.sgl_bytes, SGL_TRANSPORT)
    sqe = sqe._replace(sgl_bytes=size, sgl_type=kind)
    return b"".join(pack(PduType.CAPSULE_CMD, sqe.pack(), [data] if data else [], digests))


def _entry(request: WireRequest, submit_ns: int) -> bytes:
    size, crc = len(request.payload), zlib.crc32(request.payload)
    return pack_entry(request.opcode, request.parameters, 0, submit_ns, size, crc) + request.payload


def _mutated(pdu: bytes, digests: Digests, draw: random.Random) -> bytes:
    """A PDU with one to four changes; its header digest is right again for most."""
    raw = bytearray(pdu)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at = draw.randrange(max(1, len(raw)))
        match draw.randrange(12):
            case 0 | 1 if raw:
                raw[at] ^= 1 << draw.randrange(8)
            case 2 | 3 if raw:
                raw[min(at, draw.randrange(72))] = draw.randrange(256)
            case 4 if len(raw) >= COMMON.size:
                raw[draw.randrange(4)] = draw.choice((*PduType, 24, 72, 128, draw.randrange(256)))
            case 5 if len(raw) >= COMMON.size:
                near = len(raw) + draw.choice((-4, -1, 1, 4, 8))
                raw[4:8] = (draw.choice((*ODD, near)) & 0xFFFFFFFF).to_bytes(4, "little")
            case 6 | 7 | 8 | 9 if len(raw) >= 72:
                field = COMMON.size + 4 * draw.randrange(16)
                raw[field : field + 4] = draw.choice(ODD).to_bytes(4, "little")
            case 10:
                del raw[at:]
            case _:
                raw += draw.randbytes(draw.choice((1, 4, 64)))
    if digests.header and draw.random() < 0.8:
        _digest(raw)
    return bytes(raw)


def _digest(raw: bytearray) -> None:
    """Make the header digest of a PDU right, so that the rest of its header is looked at."""
    end = next((size for kind, size in HEADER_BYTES.items() if raw[:1] == bytes([kind])), len(raw))
    if len(raw) >= end + 4:
        raw[end : end + 4] = crc32c(raw[:end]).to_bytes(4, "little")


def _own(raw: bytes, good: bytes, digests: Digests) -> bytes:
    """A mutated capsule that changes blocks, if it changes any, of the attacker's own alone."""
    entry = raw[COMMON.size : 72]
    if entry[:1] not in _CHANGES:
        return raw
    if len(entry) < 64:  # bytes of the PDUs that follow would be the rest of its entry
        return good
    if entry[0] == Nvm.DATASET_MANAGEMENT:  # its ranges are its data
        is_same = good[COMMON.size] == Nvm.DATASET_MANAGEMENT
        return good[: COMMON.size] + entry + good[72:] if is_same else good
    sqe = Sqe.parse(entry)
    safe = bytearray(raw)
    safe[COMMON.size : 72] = sqe._replace(cdw10=max(OWN_LBA, sqe.cdw10)).pack()
    if digests.header:
        _digest(safe)
    return bytes(safe)


def exchange(line: socket.socket, data: bytes, patience_s: float) -> bytes | None:
    """Send bytes, close that direction, and receive until the peer closes; None if it does not."""
    line.setblocking(False)
    poll, answer, view, deadline = select.poll(), bytearray(), memoryview(data), time.monotonic() + patience_s
    poll.register(line, select.POLLIN | select.POLLOUT)
    try:
        while time.monotonic() < deadline:
            for _, events in poll.poll(1000 * patience_s):
                if events & select.POLLOUT:
                    view = view[line.send(view, socket.MSG_NOSIGNAL) :] if view else view
                    if not view:
                        line.shutdown(socket.SHUT_WR)
                        poll.modify(line, select.POLLIN)
                if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                    more = line.recv(1 << 16)
                    if not more:
                        return bytes(answer)
                    answer += more
    except OSError:  # the controller has closed the connection with bytes that it did not read
        return bytes(answer)
    return None


def statuses(answer: bytes) -> list[int]:
    """Statuses of the completions in what a controller has sent; raises ValueError where it is no PDUs of a controller.

    The last PDU may have been cut by the end of the connection.
    """
    codes, at = [], 0
    while at + COMMON.size <= len(answer):
        kind, _, header, _, size = COMMON.unpack_from(answer, at)
        if kind not in FROM_CONTROLLER or HEADER_BYTES[PduType(kind)] != header or size < header:
            raise ValueError(f"no PDU of a controller: {answer[at : at + 24].hex()}")
        if kind == PduType.CAPSULE_RESP and at + size <= len(answer):
            codes.append(Cqe.parse(answer[at + COMMON.size : at + header]).status)
        at += size
    return codes
