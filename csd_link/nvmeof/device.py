"""A `Device` over NVMe/TCP: a session with the namespace of a drive that holds sequences."""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from csd_link.host_end import AttachedDevice, Lost, Pending, Silent, path_lost
from csd_link.nvmeof.commands import SGL_TRANSPORT, Code, Csi, Sqe
from csd_link.nvmeof.host import Host
from csd_link.nvmeof.host_queue import Reply, Silence, StatusError
from csd_link.nvmeof.pdu import Buffer, Digests
from csd_link.nvmeof.sequences import UNKNOWN_SESSION, Encoded, Op, attached, dwords, unframed
from csd_link.nvmeof.stream import Closed
from csd_link.nvmeof.tls import Credentials, TlsError
from csd_link.window import Identity
from csd_link.wire import ENTRY
from csd_spec import Command, Completion

CTRL_LOSS_S = 60.0  # for a lost connection to be made again, if attempts fail without an answer
REFUSED_S = 2.0  # the same, while no process listens or the controller refuses this host: waiting hardly changes that
MAX_DELAY_S = 1.0  # between two attempts
MAX_RESUMES = 50  # connections in a row on which no command ended
_ATTACH_BYTES = 1 << 16
_FETCH_BYTES = 1 << 20  # asked for at first; the rest of a larger completion is fetched after it
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a drive listens: host, port, NQN of its subsystem."""

    host: str
    port: int
    nqn: str


@dataclass(slots=True, eq=False)
class _Sent:
    """A command in flight. parts: its entry and its arrays."""

    number: int
    parts: list[Buffer]
    size: int
    future: Future[Completion]
    is_asked: bool = False  # whether a Fetch of its completion is in flight
    frame: bytearray | None = None  # of a completion that is fetched in two parts


class NvmeDevice(AttachedDevice):
    """A drive behind a TCP connection. When it is lost, commands under way and later ones end with PATH_LOST.

    A connection that breaks is made again; commands whose end is not known are sent again with their numbers, and the
    drive executes none of them twice. A drive that has forgotten the session has begun anew, and is lost.
    """

    def __init__(
        self,
        locate: Callable[[], Endpoint],
        name: str = "",
        digests: Digests = Digests(),
        ctrl_loss_s: float = CTRL_LOSS_S,
        tls: Credentials | None = None,
    ) -> None:
        """Attach.

        Args:
            locate: Returns the drive's address; raises OSError if it is not known.
            name: NQN of this host; empty for one of its own.
            digests: Digests of PDUs.
            ctrl_loss_s: How long a lost connection is tried to be made again, s.
            tls: CA of the drive, and certificate of this host; None for no TLS.

        Raises:
            Lost: No drive answers.
        """
        self._locate, self._digests, self._ctrl_loss_s, self._tls = locate, digests, ctrl_loss_s, tls
        self._sending, self._submitting = threading.Lock(), threading.Lock()
        self._turn, self._reaping = threading.Condition(), False
        self._waiting: deque[_Sent] = deque()  # for their ends, in order
        self._unsent: deque[_Sent] = deque()  # the last ones of these
        self._large: _Sent | None = None  # the last one sent, whose data the drive asks for
        self._numbers = 0
        self._resumes = 0  # since a command has ended
        try:
            with ExitStack() as undo:
                self._host = self._connect(name)
                undo.callback(self._host.close)
                self._name = self._host.name
                self._nsid = self._find()
                self._session, self.identity = self._attach()
                undo.pop_all()
        except (OSError, StatusError, ValueError) as error:
            raise Lost(f"no drive answers over NVMe/TCP: {error}") from error

    def _submit(self, command: Command, submit_ns: int) -> Future[Completion]:
        encoded = Encoded.of(command, self.max_bytes)
        future = Pending(self._reap)
        with self._submitting:
            while not self._lost and len(self._waiting) >= self.identity.layout.depth:
                with suppress(IndexError):  # another thread has ended the last one
                    self._reap(self._waiting[0].future)
            if self._lost:
                future.set_result(path_lost(self._lost))
                return future
            sent = _Sent(self._numbers, encoded.parts(self._numbers, submit_ns), ENTRY.size + encoded.size, future)
            self._numbers += 1
            with self._sending:
                self._waiting.append(sent)
                self._unsent.append(sent)
                self._send()
        return future

    def close(self) -> None:
        """Wait for what is under way, then end the association."""
        try:
            for sent in list(self._waiting):
                self._reap(sent.future)
        finally:
            self._host.close()

    def _connect(self, name: str) -> Host:
        at = self._locate()
        return Host(at.host, at.port, at.nqn, name, self._digests, tls=self._tls)

    def _find(self) -> int:
        """Number of the namespace that holds sequences."""
        (nsid,) = struct.unpack_from("<I", self._host.identify(0x07, 0, Csi.SEQUENCES))
        if not nsid:
            raise ValueError("the subsystem has no namespace of sequences")
        return int(nsid)

    def _attach(self) -> tuple[int, Identity]:
        data = self._host.io.command(Sqe(Op.ATTACH, nsid=self._nsid, cdw10=_ATTACH_BYTES), (), _ATTACH_BYTES).data
        return attached(data)

    def _send(self) -> None:
        """Send what was not sent yet. The data of a large command has to arrive before the next one is sent.

        Submit and Fetch go in one piece. They cannot be one command, although two bits of an opcode have a value for
        data both ways: a capsule has one SGL descriptor. Whoever reads notices a connection that is lost.
        """
        io = self._host.io
        while self._unsent and not self._large:
            sent = self._unsent.popleft()
            kept = sent.number - self._waiting[0].number
            io.begin(self._sqe(Op.SUBMIT, sent.number, sent.size, kept), sent.parts, 0, (sent, Op.SUBMIT))
            if sent.size > io.in_capsule_bytes:
                self._large = sent
            else:
                self._fetch(sent)
        try:
            io.flush()
        except OSError:
            io.shut()

    def _fetch(self, sent: _Sent) -> None:
        sent.is_asked = True
        at, into = (_FETCH_BYTES, memoryview(sent.frame)[_FETCH_BYTES:]) if sent.frame else (0, None)
        size = _FETCH_BYTES if into is None else len(into)
        self._host.io.begin(self._sqe(Op.FETCH, sent.number, size, at), (), size, (sent, Op.FETCH), into)

    def _sqe(self, op: Op, number: int, size: int, cdw11: int) -> Sqe:
        words = dwords(size, cdw11, number, self._session)
        return Sqe(op, 0x40, 0, self._nsid, 0, 0, 0, 0, 0, SGL_TRANSPORT, *words)

    def _reap(self, future: Future[Completion]) -> None:
        """Complete commands until this one is; one thread at a time reads."""
        while True:
            with self._turn:
                while self._reaping and not future.done():
                    self._turn.wait()
                if future.done():
                    return
                self._reaping = True
            try:
                while not self._take(self._host.io.next()):
                    pass
            except Silence as silence:
                self._fail(Silent(str(silence)))
            except OSError as error:
                self._resume(error)
            finally:
                with self._turn:
                    self._reaping = False
                    self._turn.notify_all()

    def _take(self, reply: Reply) -> bool:
        """An NVMe command has ended; whether a command of ours has with it."""
        sent, op = reply.context
        if not reply.status and op is Op.SUBMIT and sent.is_asked:
            return False
        with self._sending:
            if reply.status == Code.INTERRUPTED and op is Op.SUBMIT:
                time.sleep(_LOOK_S)  # other hosts have too much in flight
                self._unsent.appendleft(sent)
                self._large = None
            elif reply.status:
                raise _status_error(reply.status)
            elif op is Op.SUBMIT:
                self._large = None
                self._fetch(sent)
            elif reply.result:
                sent.frame = bytearray(reply.result & 0xFFFFFFFF)
                if len(reply.data) != _FETCH_BYTES or len(sent.frame) <= _FETCH_BYTES:
                    raise Lost("its answer to a Fetch has another size than it says")
                sent.frame[:_FETCH_BYTES] = reply.data
                self._fetch(sent)
            else:
                self._waiting.remove(sent)
                self._resumes = 0
                sent.future.set_result(unframed(sent.frame or reply.data))
                return True
            self._send()
        return False

    def _resume(self, error: OSError) -> None:
        """Make the connection again and send what is under way again, or give the drive up."""
        if isinstance(error, Lost):
            self._fail(error)
            return
        self._host.close()
        self._resumes += 1
        if self._resumes > MAX_RESUMES:
            self._fail(Lost(f"{MAX_RESUMES} connections were lost before a command ended: {error}"))
            return
        try:
            host = self._reconnect(error)
        except Lost as lost:
            self._fail(lost)
            return
        with self._sending:
            self._host = host
            self._unsent, self._large = self._waiting.copy(), None
            for sent in self._waiting:
                sent.is_asked, sent.frame = False, None
            self._send()

    def _reconnect(self, error: OSError) -> Host:
        """Make an association again after `error`; raises Lost after `ctrl_loss_s`."""
        began = refused = time.monotonic()
        delay_s = _LOOK_S
        while True:
            try:
                return self._connect(self._name)
            except (OSError, StatusError) as failed:
                now = time.monotonic()
                if not _is_refusal(failed):
                    refused = now
                if now - began >= self._ctrl_loss_s or now - refused >= REFUSED_S:
                    raise Lost(f"its connection is gone ({error}), and it takes no other: {failed}") from failed
            time.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_DELAY_S)

    def _fail(self, lost: Lost) -> None:
        self._lost = lost
        with self._sending:
            while self._waiting:
                self._waiting.popleft().future.set_result(path_lost(lost))


def _is_refusal(error: OSError | StatusError) -> bool:
    """Whether no process listens for this host, in contrast to a drive that is too slow, or out of reach."""
    if isinstance(error, StatusError):
        return error.status == Code.INVALID_HOST
    return isinstance(error, ConnectionRefusedError | FileNotFoundError | TlsError)


def _status_error(status: int) -> OSError:
    """The reason to connect again, or why the drive is lost."""
    if status == Code.TRANSIENT:
        return Closed("data was damaged on its way to the drive")
    if status == UNKNOWN_SESSION:
        return Lost("its firmware has begun anew")
    return Lost(f"it refuses an NVMe command with status {status:#05x}")
