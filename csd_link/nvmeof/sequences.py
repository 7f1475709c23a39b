"""Namespace of sequences: the drive's commands as vendor-specific NVMe commands.

| opcode | command | data | CDW10 | CDW11 | CDW12, 13 | CDW14, 15 |
|---|---|---|---|---|---|---|
| 82h | Attach | to the host: session, then identity as JSON | bytes | | | |
| 81h | Submit | to the drive: entry of 64 bytes, payload (`wire.pack_entry`) | bytes | outstanding | number | session |
| 86h | Fetch | to the host: a frame with the completion | bytes | offset | number | session |
| 80h | Detach | none | | | | session |

Attach begins a session, which outlives connections, and Detach ends it; those of hosts that have left end later.
Commands of a session are numbered from 0 on. The drive executes each number once and in order, and keeps its completion
until a later Submit releases it: only the last `outstanding` numbers before that Submit are still needed. So a host
that has lost a connection resends all commands without a completion.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import partial
from typing import NamedTuple

from csd_io.crc import crc32
from csd_link.drive_end import Service, carry_out
from csd_link.nvmeof.commands import Answer, Code, CommandError, Csi, Sqe, words
from csd_link.nvmeof.pdu import Buffer, part_of
from csd_link.nvmeof.subsystem import effects_of
from csd_link.window import Identity
from csd_link.wire import (
    ENTRY,
    WireError,
    WireRequest,
    check_payload,
    decode_completion,
    encode_arrays,
    encode_completion,
    pack_entry,
    unpack_entry,
)
from csd_spec import Command, Completion, Status

ATTACHED = struct.Struct("<QII")  # session, version, bytes of JSON
FRAME = struct.Struct("<QQ")  # bytes of a completion's fields, bytes of its data
FRAME_VERSION = 1
UNKNOWN_SESSION = 0x7C1  # vendor-specific status
LOST_SESSION = "it does not know this session: it has restarted, or has dropped it while this host was gone"
LEFT_S = 120.0  # sessions outlive the last controller of their host by that, twice our initiator's reconnect timeout
MAX_SESSIONS, MAX_HOST_SESSIONS = 64, 16  # of all hosts, and of one
KEPT_BYTES = 1 << 30  # completions of all sessions: there are fewer sessions, if each may keep more
_MIN_SESSIONS = 8
FIELDS_BYTES = 1 << 16  # maximum bytes of a completion besides its data
_ALIGN = 16  # alignment of a completion's data in its frame


class Op(IntEnum):
    """Opcodes; their low two bits are the direction of data."""

    DETACH = 0x80
    SUBMIT = 0x81
    ATTACH = 0x82
    FETCH = 0x86


class Session:
    """Commands of one host, each executed once and in order."""

    def __init__(self, service: Service, host: str, depth: int, slot_bytes: int) -> None:
        self.host = host
        self._service, self._depth, self._slot_bytes = service, depth, slot_bytes
        self._lock, self._next = threading.Lock(), 0
        self._kept: dict[int, tuple[bytes, ...]] = {}
        self.kept_bytes = 0
        service.attach()

    def submit(self, number: int, outstanding: int, data: Buffer) -> None:
        """Execute a command unless it was already executed; raises CommandError if an earlier one is missing."""
        with self._lock:
            if number < self._next:
                return
            if number > self._next or outstanding >= self._depth:
                raise CommandError(Code.SEQUENCE_ERROR)
            for old in [earlier for earlier in self._kept if earlier < number - outstanding]:
                self.kept_bytes -= sum(map(len, self._kept.pop(old)))
            assert number not in self._kept and self.kept_bytes >= 0
            self._next += 1  # first: it must not be executed again, even after an error
            frame = _frame(carry_out(self._service, partial(_request, data), self._slot_bytes))
            self._kept[number] = frame
            self.kept_bytes += sum(map(len, frame))
            assert len(self._kept) <= self._depth, f"{len(self._kept)} completions are kept"

    def fetch(self, number: int) -> tuple[bytes, ...]:
        """Return the parts of a completion's frame; raises CommandError if it is not kept."""
        with self._lock:
            frame = self._kept.get(number)
        if frame is None:
            raise CommandError(Code.SEQUENCE_ERROR)
        return frame


class SequenceNamespace:
    """Vendor-specific command set over services; each session has its own service."""

    csi: int = Csi.SEQUENCES
    effects: Mapping[int, int] = effects_of(Op, (Op.SUBMIT,))

    def __init__(
        self, serve: Callable[[str], Service], identity: Identity, uuid: bytes, sessions: int = MAX_SESSIONS
    ) -> None:
        """`serve` returns the service of a host, by its NQN; `sessions` is the maximum number kept."""
        self._serve, self._identity, self.uuid, self._layout = serve, identity, uuid, identity.layout
        session_bytes = self._layout.depth * (self._layout.slot_bytes + FIELDS_BYTES)  # kept by a session at most
        self.most_sessions = min(sessions, max(_MIN_SESSIONS, KEPT_BYTES // session_bytes))
        self.most_kept_bytes = self.most_sessions * session_bytes
        self._lock = threading.Lock()
        self._sessions: OrderedDict[int, Session] = OrderedDict()
        self._left: dict[str, float] = {}  # hosts without a controller, and since when, time.monotonic()

    def __len__(self) -> int:
        """Current number of sessions."""
        return len(self._sessions)

    @property
    def kept_bytes(self) -> int:
        """Bytes of completions kept by sessions."""
        return sum(session.kept_bytes for session in tuple(self._sessions.values()))

    def identify(self, host: str) -> bytes:
        return b""

    def data_bytes(self, sqe: Sqe) -> int:
        if sqe.opcode == Op.SUBMIT and not ENTRY.size <= sqe.cdw10 <= ENTRY.size + self._layout.slot_bytes:
            raise CommandError(Code.INVALID_FIELD)
        return sqe.cdw10

    def execute(self, sqe: Sqe, data: Buffer, host: str) -> Answer:
        if sqe.opcode == Op.ATTACH:
            return _whole((self._attach(host),), sqe.cdw10)
        name = words(sqe.cdw14, sqe.cdw15)
        number, session = words(sqe.cdw12, sqe.cdw13), self._session(name, host)
        if sqe.opcode == Op.DETACH:
            with self._lock:
                self._sessions.pop(name, None)
            return Answer()
        if sqe.opcode == Op.SUBMIT:
            session.submit(number, sqe.cdw11, data)
            return Answer()
        frame = session.fetch(number)
        if sqe.cdw11:
            return Answer(tuple(part_of(frame, sqe.cdw11, sqe.cdw10)))
        return _whole(frame, sqe.cdw10)

    def _attach(self, host: str) -> bytes:
        session = Session(self._serve(host), host, self._layout.depth, self._layout.slot_bytes)
        number = int.from_bytes(os.urandom(8), "little") | 1
        with self._lock:
            self._left.pop(host, None)
            self._expire()
            self._sessions[number] = session
            self._drop()
        text = self._identity.to_json()
        return ATTACHED.pack(number, FRAME_VERSION, len(text)) + text

    def _session(self, number: int, host: str) -> Session:
        with self._lock:
            session = self._sessions.get(number)
            if session is None or session.host != host:
                raise CommandError(UNKNOWN_SESSION)
            self._left.pop(host, None)
            self._expire()
            self._sessions.move_to_end(number)
        return session

    def _drop(self) -> None:
        """Drop sessions while there are too many, or too many of a host; the caller holds the lock.

        The host with the most sessions loses one: of a host that has left, if it is one of several, then the least
        recently used one. So a host that opens sessions without limit cannot evict those of others.
        """
        while True:
            shares = Counter(session.host for session in self._sessions.values())
            host, held = max(shares.items(), key=lambda share: (share[1], share[0] in self._left))
            if held <= MAX_HOST_SESSIONS and len(self._sessions) <= self.most_sessions:
                return
            del self._sessions[next(number for number, session in self._sessions.items() if session.host == host)]

    def host_left(self, host: str) -> None:
        """Keep the sessions of a host without controller for LEFT_S: it may connect again."""
        with self._lock:
            if not any(session.host == host for session in self._sessions.values()):
                return
            self._left[host] = time.monotonic()

    def _expire(self) -> None:
        """Drop the sessions of hosts that have left LEFT_S ago; the caller holds the lock."""
        if not self._left:
            return
        until = time.monotonic() - LEFT_S
        gone = {host for host, since in self._left.items() if since <= until}
        for number in [number for number, session in self._sessions.items() if session.host in gone]:
            del self._sessions[number]
        for host in gone:
            del self._left[host]


def _whole(parts: tuple[bytes, ...], most: int) -> Answer:
    """Return all parts if they fit; otherwise what fits, with the total size as the result."""
    size = sum(map(len, parts))
    return Answer(parts) if size <= most else Answer(tuple(part_of(parts, 0, most)), size)


def _request(data: Buffer) -> tuple[WireRequest, int]:
    opcode, parameters, submit_ns, size, crc = unpack_entry(data)
    return check_payload(WireRequest(opcode, parameters, memoryview(data)[ENTRY.size :]), size, crc), submit_ns


def _frame(done: Completion) -> tuple[bytes, ...]:
    fields, data = encode_completion(done, crc32)
    return FRAME.pack(len(fields), len(data)) + fields.ljust(-(-len(fields) // _ALIGN) * _ALIGN, b"\0"), data


class EncodedCommand(NamedTuple):
    """An encoded command; `size` and `crc` are those of all its arrays."""

    opcode: int
    parameters: tuple[int, ...]
    arrays: list[Buffer]
    size: int
    crc: int

    @classmethod
    def of(cls, command: Command, max_bytes: int) -> EncodedCommand:
        """Encode a command; raises ValueError if it exceeds `max_bytes`."""
        opcode, parameters, arrays = encode_arrays(command)
        size = crc = 0
        for array in arrays:
            size, crc = size + len(array), crc32(array, crc)
        if size > max_bytes:
            raise ValueError(f"a command of {size:,} bytes: this drive takes {max_bytes:,}")
        return cls(opcode, parameters, arrays, size, crc)

    def parts(self, number: int, submit_ns: int) -> list[Buffer]:
        """Data of Submit (zero-copy)."""
        return [pack_entry(self.opcode, self.parameters, number, submit_ns, self.size, self.crc), *self.arrays]


def dwords(size: int, cdw11: int, number: int, session: int) -> tuple[int, ...]:
    """CDW10 to CDW15 of Submit and Fetch."""
    low = 0xFFFFFFFF
    return size, cdw11, number & low, number >> 32, session & low, session >> 32


def decode_attach(data: Buffer) -> tuple[int, Identity]:
    """Decode the answer to Attach: session and identity; raises ValueError for another protocol version."""
    session, version, size = ATTACHED.unpack_from(data)
    if version != FRAME_VERSION:
        raise ValueError(f"the drive has version {version} of its commands, this host has {FRAME_VERSION}")
    return session, Identity.from_json(bytes(data[ATTACHED.size : ATTACHED.size + size]))


def frame_bytes(head: Buffer) -> int:
    """Size of the frame that begins with these bytes."""
    fields_bytes, data_bytes = FRAME.unpack_from(head)
    return FRAME.size + -(-int(fields_bytes) // _ALIGN) * _ALIGN + int(data_bytes)


def decode_frame(frame: bytearray | memoryview) -> Completion:
    """Decode the completion in a frame, whose memory its arrays share."""
    try:
        fields_bytes, data_bytes = FRAME.unpack_from(frame)
        view = memoryview(frame)[FRAME.size :]
        at = -(-fields_bytes // _ALIGN) * _ALIGN
        head, data = decode_completion(view[:fields_bytes]), view[at:]
        if len(data) != data_bytes or data_bytes != head.data_bytes or crc32(data) != head.data_crc:
            raise WireError("data that does not match its checksum")
        return head.with_data(data)
    except (WireError, struct.error) as error:
        return Completion(status=Status.TRANSFER_ERROR, reason=f"from the drive: {error}")
