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

from csd_link.host_end import AttachedDrive, DriveLostError, HeartbeatTimeoutError, Pending, path_lost
from csd_link.nvmeof.commands import RETRY_S, SGL_TRANSPORT, Code, Csi, Sqe
from csd_link.nvmeof.host import NvmeHost
from csd_link.nvmeof.host_queue import ControllerTimeoutError, Reply, StatusError
from csd_link.nvmeof.pdu import Buffer, Digests
from csd_link.nvmeof.sequences import (
    LOST_SESSION,
    UNKNOWN_SESSION,
    EncodedCommand,
    Op,
    decode_attach,
    decode_frame,
    dwords,
)
from csd_link.nvmeof.stream import ConnectionClosedError
from csd_link.nvmeof.tls import Credentials, TlsError
from csd_link.window import Identity
from csd_link.wire import ENTRY
from csd_spec import Command, Completion

CTRL_LOSS_S = 60.0  # reconnect timeout while attempts fail without an answer
REFUSED_S = 2.0  # the same while no process listens or the host is rejected: waiting rarely helps
MAX_DELAY_S = 1.0  # maximum delay between two attempts
MAX_RESUMES = 50  # consecutive connections on which no command completed
_ATTACH_BYTES = 1 << 16
_FETCH_BYTES = 1 << 20  # fetched at first; the rest of a larger completion is fetched afterwards
_DELAY_S, _MAX_RETRY_DELAY_S = 0.01, 0.25  # before a retry, and before a later one


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of a drive: host, port, NQN of its subsystem."""

    host: str
    port: int
    nqn: str


@dataclass(slots=True, eq=False)
class _SentCommand:
    """A command in flight; `parts` are its entry and its arrays."""

    number: int
    parts: list[Buffer]
    size: int
    future: Future[Completion]
    is_asked: bool = False  # whether a Fetch of its completion is in flight
    frame: bytearray | None = None  # buffer of a completion that is fetched in two parts


class NvmeDrive(AttachedDrive):
    """A drive over a TCP connection. When it is lost, commands in flight and later ones complete with PATH_LOST.

    A lost connection is re-established; commands without a completion are sent again with their numbers, and the drive
    executes each only once. A drive that does not know the session has restarted, and is lost.
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
            name: NQN of this host; empty generates one.
            digests: Digests of PDUs.
            ctrl_loss_s: Reconnect timeout, seconds.
            tls: CA of the drive, and certificate of this host; None for no TLS.

        Raises:
            DriveLostError: No drive answers.
        """
        self._locate, self._digests, self._ctrl_loss_s, self._tls = locate, digests, ctrl_loss_s, tls
        self._sending, self._submitting = threading.Lock(), threading.Lock()
        self._turn, self._reaping = threading.Condition(), False
        self._waiting: deque[_SentCommand] = deque()  # commands in flight, in order
        self._unsent: deque[_SentCommand] = deque()  # the last ones of `_waiting`
        self._large: _SentCommand | None = None  # command whose data is being transferred by R2T
        self._numbers = 0
        self._resumes = 0  # reconnects since the last completed command
        self._retry_until = 0.0  # time.monotonic() at which retries end; 0: the last command was not retried
        self._delay_s = _DELAY_S
        try:
            with ExitStack() as undo:
                self._host = self._connect_first(name)
                undo.callback(self._host.close)
                self._name = self._host.name
                self._nsid = self._find()
                self._session, self.identity = self._attach()
                undo.pop_all()
        except (OSError, StatusError, ValueError) as error:
            raise DriveLostError(f"no drive answers over NVMe/TCP: {error}") from error

    def _submit(self, command: Command, submit_ns: int) -> Future[Completion]:
        encoded = EncodedCommand.of(command, self.max_bytes)
        future = Pending(self._poll_completions)
        with self._submitting:
            while not self._lost and len(self._waiting) >= self.identity.layout.depth:
                with suppress(IndexError):  # another thread has completed the last one
                    self._poll_completions(self._waiting[0].future)
            if self._lost:
                future.set_result(path_lost(self._lost))
                return future
            sent = _SentCommand(
                self._numbers, encoded.parts(self._numbers, submit_ns), ENTRY.size + encoded.size, future
            )
            self._numbers += 1
            with self._sending:
                self._waiting.append(sent)
                self._unsent.append(sent)
                self._send()
        return future

    def close(self) -> None:
        """Wait for all commands in flight, then disconnect."""
        try:
            for sent in list(self._waiting):
                self._poll_completions(sent.future)
            if not self._lost:
                with suppress(OSError):  # no answer is awaited: a drive that is silent drops the session later
                    self._host.io.begin(self._sqe(Op.DETACH, 0, 0, 0))
                    self._host.io.flush()
        finally:
            self._host.close()

    def _connect_first(self, name: str) -> NvmeHost:
        """Connect, also to a drive that is busy with the controllers of others for a moment."""
        until = time.monotonic() + REFUSED_S
        while True:
            try:
                return self._connect(name)
            except StatusError as error:
                if error.status != Code.CONTROLLER_BUSY or time.monotonic() > until:
                    raise
            time.sleep(_MAX_RETRY_DELAY_S)

    def _connect(self, name: str) -> NvmeHost:
        at = self._locate()
        return NvmeHost(at.host, at.port, at.nqn, name, self._digests, tls=self._tls)

    def _find(self) -> int:
        """Find the namespace of sequences; returns its NSID."""
        (nsid,) = struct.unpack_from("<I", self._host.identify(0x07, 0, Csi.SEQUENCES))
        if not nsid:
            raise ValueError("the subsystem has no namespace of sequences")
        return int(nsid)

    def _attach(self) -> tuple[int, Identity]:
        data = self._host.io.command(Sqe(Op.ATTACH, nsid=self._nsid, cdw10=_ATTACH_BYTES), (), _ATTACH_BYTES).data
        return decode_attach(data)

    def _send(self) -> None:
        """Send unsent commands. The data of a large command must have arrived before the next one is sent.

        Submit and Fetch are sent together. They cannot be one command, although an opcode can have both directions:
        a capsule has one SGL descriptor. The reading thread handles a lost connection.
        """
        io = self._host.io
        while self._unsent and not self._large:
            sent = self._unsent.popleft()
            assert not sent.future.done(), f"command {sent.number} is sent after its completion"
            outstanding = sent.number - self._waiting[0].number
            io.begin(self._sqe(Op.SUBMIT, sent.number, sent.size, outstanding), sent.parts, 0, (sent, Op.SUBMIT))
            if sent.size > io.in_capsule_bytes:
                self._large = sent
            else:
                self._fetch(sent)
        try:
            io.flush()
        except OSError:
            io.shut()

    def _fetch(self, sent: _SentCommand) -> None:
        assert not sent.is_asked or sent.frame, f"command {sent.number}: its completion is fetched twice"
        sent.is_asked = True
        at, into = (_FETCH_BYTES, memoryview(sent.frame)[_FETCH_BYTES:]) if sent.frame else (0, None)
        size = _FETCH_BYTES if into is None else len(into)
        self._host.io.begin(self._sqe(Op.FETCH, sent.number, size, at), (), size, (sent, Op.FETCH), into)

    def _sqe(self, op: Op, number: int, size: int, cdw11: int) -> Sqe:
        words = dwords(size, cdw11, number, self._session)
        return Sqe(op, 0x40, 0, self._nsid, 0, 0, 0, 0, 0, SGL_TRANSPORT, *words)

    def _poll_completions(self, future: Future[Completion]) -> None:
        """Poll completions until this command is done; one thread reads at a time."""
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
            except ControllerTimeoutError as silence:
                self._fail(HeartbeatTimeoutError(str(silence)))
            except OSError as error:
                self._resume(error)
            finally:
                with self._turn:
                    self._reaping = False
                    self._turn.notify_all()

    def _take(self, reply: Reply) -> bool:
        """Handle the completion of an NVMe command; returns whether it completes one of the drive's commands."""
        sent, op = reply.context
        if not reply.status and op is Op.SUBMIT and sent.is_asked:
            return False
        with self._sending:
            # The target's limit on data in flight is exhausted
            if reply.status == Code.INTERRUPTED and (op is Op.FETCH or not sent.is_asked):
                self._wait_to_retry()
                if op is Op.SUBMIT:
                    self._unsent.appendleft(sent)
                    self._large = None
                else:
                    sent.is_asked = False
                    self._fetch(sent)
            elif reply.status:
                raise _status_error(reply.status)
            elif op is Op.SUBMIT:
                assert self._large == sent, f"command {sent.number} was not large"
                self._large = None
                self._fetch(sent)
            elif reply.result:
                sent.frame = bytearray(reply.result & 0xFFFFFFFF)
                if len(reply.data) != _FETCH_BYTES or len(sent.frame) <= _FETCH_BYTES:
                    raise DriveLostError("its answer to a Fetch has another size than it says")
                sent.frame[:_FETCH_BYTES] = reply.data
                self._fetch(sent)
            else:
                self._waiting.remove(sent)
                self._resumes, self._retry_until, self._delay_s = 0, 0.0, _DELAY_S
                sent.future.set_result(decode_frame(sent.frame or reply.data))
                return True
            self._send()
        return False

    def _wait_to_retry(self) -> None:
        """Wait before a command is sent again; raises DriveLostError when that has taken RETRY_S."""
        now = time.monotonic()
        self._retry_until = self._retry_until or now + RETRY_S
        if now > self._retry_until:
            raise DriveLostError(f"it has had no memory for this host's data for {RETRY_S:g} s (Command Interrupted)")
        time.sleep(self._delay_s)
        self._delay_s = min(2 * self._delay_s, _MAX_RETRY_DELAY_S)

    def _resume(self, error: OSError) -> None:
        """Reconnect and resend commands in flight, or mark the drive as lost."""
        if isinstance(error, DriveLostError):
            self._fail(error)
            return
        self._host.close()
        self._resumes += 1
        if self._resumes > MAX_RESUMES:
            self._fail(DriveLostError(f"{MAX_RESUMES} connections were lost before a command ended: {error}"))
            return
        try:
            host = self._reconnect(error)
        except DriveLostError as lost:
            self._fail(lost)
            return
        with self._sending:
            self._host = host
            self._unsent, self._large = self._waiting.copy(), None
            for sent in self._waiting:
                sent.is_asked, sent.frame = False, None
            self._send()

    def _reconnect(self, error: OSError) -> NvmeHost:
        """Reconnect after `error`; raises DriveLostError after `ctrl_loss_s`."""
        began = refused = time.monotonic()
        delay_s = _DELAY_S
        while True:
            try:
                return self._connect(self._name)
            except (OSError, StatusError) as failed:
                now = time.monotonic()
                if not _is_refusal(failed):
                    refused = now
                if now - began >= self._ctrl_loss_s or now - refused >= REFUSED_S:
                    raise DriveLostError(
                        f"its connection is gone ({error}), and it takes no other: {failed}"
                    ) from failed
            time.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_DELAY_S)

    def _fail(self, lost: DriveLostError) -> None:
        self._lost = lost
        with self._sending:
            while self._waiting:
                self._waiting.popleft().future.set_result(path_lost(lost))


def _is_refusal(error: OSError | StatusError) -> bool:
    """Whether no process accepts this host, as opposed to a drive that is slow or unreachable."""
    if isinstance(error, StatusError):
        return error.status == Code.INVALID_HOST
    return isinstance(error, ConnectionRefusedError | FileNotFoundError | TlsError)


def _status_error(status: int) -> OSError:
    """Convert a status to the reason to reconnect, or to the reason why the drive is lost."""
    if status == Code.TRANSIENT:
        return ConnectionClosedError("data was damaged on its way to the drive")
    if status == Code.INTERRUPTED:  # all are sent again: others follow it already
        return ConnectionClosedError("the drive has no memory for a command")
    if status == UNKNOWN_SESSION:
        return DriveLostError(LOST_SESSION)
    return DriveLostError(f"it refuses an NVMe command with status {status:#05x}")
