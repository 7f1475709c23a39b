"""The host's end of a window, and a `Device` behind it."""

from __future__ import annotations

import errno
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from csd_io.crc import crc32
from csd_link.cutting import submit_in_parts
from csd_link.doorbell import Doorbell, Polling
from csd_link.lease import holder, own_words
from csd_link.liveness import Liveness
from csd_link.window import (
    BLOCK_BYTES,
    BODY_BYTES,
    DRIVE_HEADER,
    HOST_HEADER,
    Block,
    Identity,
    Kind,
    Medium,
    next_generation,
    unpack,
)
from csd_link.wire import ENTRY, Request, WireError, decode_completion, encode, pack_entry
from csd_spec import Command, Completion, DriveSpec, Status

LOOK_S = 0.05  # at the drive's header, while waiting
SPIN_S = 200e-6  # look again without a pause for so long, and give way to whoever else wants the processor
HANDOVER_S = 0.3  # from a closed doorbell until the next host has attached
PATIENCE_S = 0.8  # a drive whose beat stands still for so long may have ended
SILENCE_S = 60.0  # one of which no more is known is given up after so long
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Lost(ConnectionError):
    """The drive's firmware went away or began anew, or another host took the window."""


class TakenError(Lost):
    """Another host has the window; a host that attached again would take it back, and so on."""


class Silent(Lost):
    """Nothing is known of the drive: it may have ended, or stand still and go on later."""


class AttachedDevice(ABC):
    """A served drive that a host has attached to. A subclass sets `identity`, and `_lost` when the drive is lost.

    Attributes:
        identity: What the drive has said of itself.

    """

    identity: Identity
    _lost: Lost | None = None

    @property
    def lost(self) -> Lost | None:
        """Why the drive is lost; None while it is not."""
        return self._lost

    @property
    def name(self) -> str:
        return self.identity.name

    @property
    def spec(self) -> DriveSpec:
        return self.identity.spec

    @property
    def max_bytes(self) -> int:
        """Of a command's payload, and of its data: what a slot holds."""
        return self.identity.layout.slot_bytes

    def submit(self, command: Command, submit_ns: int) -> Future[Completion]:
        return submit_in_parts(self._submit, command, submit_ns, self.max_bytes)

    @abstractmethod
    def _submit(self, command: Command, submit_ns: int) -> Future[Completion]:
        """Submit a command of at most `max_bytes`; raises ValueError for a larger one."""

    @abstractmethod
    def close(self) -> None:
        """Wait for what is under way, and let go."""


class HostEnd:
    """Requests in, completions out, in order; no threads and no clock. What it asks of time is to be called again."""

    def __init__(self, medium: Medium) -> None:
        self.medium = medium
        self.identity: Identity | None = None
        self.host = self.drive = 0  # generations
        self.begun = self.ended = 0  # requests of this generation
        self.attached = False
        self.beat = -1

    def attach(self) -> bool:
        """One step of attaching: whether the drive has answered."""
        header = self._header()
        if header is None or not header.drive:
            return False
        if self.attached:
            raise Lost("attached before: make another end")
        if header.drive != self.drive:
            identity = Identity.from_json(header.body)
            if identity.layout.blocks > self.medium.blocks:
                raise ValueError(f"window of {identity.layout.blocks} blocks: the medium has {self.medium.blocks}")
            before = unpack(self.medium.read(HOST_HEADER))
            mine = before.host if before and before.kind is Kind.HOST else 0
            self.identity, self.drive = identity, header.drive
            self.host = next_generation(mine, header.host)
            self.medium.write(HOST_HEADER, Block(Kind.HOST, self.host, self.drive, 0, own_words()).pack())
        self.attached = header.host == self.host
        return self.attached

    @property
    def room(self) -> bool:
        """Whether another request may begin."""
        assert self.identity is not None
        return self.begun - self.ended < self.identity.layout.depth

    def submit(self, request: Request, submit_ns: int) -> int:
        """Begin a request where there is room; returns its sequence number. Raises ValueError for one too large."""
        assert self.attached and self.room and self.identity is not None
        layout, sequence, payload = self.identity.layout, self.begun, request.payload
        inline = len(payload) <= BODY_BYTES - ENTRY.size
        if len(payload) > layout.slot_bytes:
            raise ValueError(
                f"a command of {len(payload):,} bytes: this window's slots hold {layout.slot_bytes:,}; "
                "serve the drive with larger ones (layout: slot_blocks)"
            )
        if not inline:
            self.medium.write(layout.to_drive(sequence), payload)
        crc, size = crc32(payload), len(payload)
        entry = pack_entry(request.opcode, request.parameters, sequence, submit_ns, size, crc)
        body = entry + payload if inline else entry
        block = Block(Kind.REQUEST, self.host, self.drive, sequence, body)
        self.medium.write(layout.request(sequence), block.pack())
        self.begun += 1
        return sequence

    def poll(self) -> Completion | None:
        """The completion of the oldest request under way, when it is there."""
        assert self.identity is not None
        if self.ended == self.begun:
            return None
        layout, sequence = self.identity.layout, self.ended
        block = unpack(self.medium.read(layout.completion(sequence)))
        awaited = Kind.COMPLETION, self.host, self.drive, sequence
        if block is None or (block.kind, block.host, block.drive, block.sequence) != awaited:
            return None
        try:
            return self._completed(block, sequence)
        except WireError as error:
            return Completion(status=Status.TRANSFER_ERROR, reason=f"from the drive: {error}")
        finally:
            self.ended += 1  # only now: another thread may submit meanwhile, and its completion would take the slot

    def _completed(self, block: Block, sequence: int) -> Completion:
        """The completion that a block announces, with its data; raises WireError."""
        assert self.identity is not None
        layout, head = self.identity.layout, decode_completion(block.body)
        data = block.body[head.size :]
        if len(data) != head.data_bytes:
            if head.data_bytes > layout.slot_bytes:
                raise WireError("more data than a slot holds")
            data = self.medium.read(layout.to_host(sequence), -(-head.data_bytes // BLOCK_BYTES))[: head.data_bytes]
        if crc32(data) != head.data_crc:
            raise WireError("data that does not match its checksum")
        return head.with_data(data)

    def look(self) -> int:
        """The drive's beat; raises Lost when it is not the one that was attached to."""
        header = self._header()
        if header is None:  # being written
            return self.beat
        if header.drive != self.drive:
            raise Lost("its firmware has begun anew")
        if header.host != self.host:
            raise TakenError(f"another host has taken its window: {holder(self.medium.read(HOST_HEADER))}")
        self.beat = header.sequence
        return self.beat

    def _header(self) -> Block | None:
        header = unpack(self.medium.read(DRIVE_HEADER))
        return header if header and header.kind is Kind.DRIVE else None


class Pending(Future[Completion]):
    """A completion that is looked for by whoever waits for it, so that no other thread has to be woken."""

    def __init__(self, reap: Callable[[Future[Completion]], None]) -> None:
        super().__init__()
        self._reap = reap

    def result(self, timeout: float | None = None) -> Completion:
        self._reap(self)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._reap(self)
        return super().exception(0)


class WindowDevice(AttachedDevice):
    """A drive behind a window.

    When the drive is lost, every command under way and every later one ends with PATH_LOST.
    """

    def __init__(
        self, medium: Medium, doorbell: Doorbell | None = None, close: Callable[[], None] | None = None
    ) -> None:
        """Attach to the drive; raises Lost when it does not answer."""
        self._doorbell, self._close, self._end = doorbell or Polling(), close, HostEnd(medium)
        self._turn, self._reaping = threading.Condition(), False
        self._submitting, self._ending = threading.Lock(), threading.Lock()
        self._waiting: deque[Future[Completion]] = deque()
        try:
            self._attach()
        except OSError as error:
            if isinstance(error, Lost) or error.errno in _FULL:
                raise
            raise Lost(f"its firmware is gone ({error})") from error
        self._liveness = Liveness(self.name)

    def _attach(self) -> None:
        began, liveness = time.monotonic(), None
        while not self._end.attach():
            liveness = liveness or (self._end.identity and Liveness(self._end.identity.name))
            waited = time.monotonic() - began
            stands_still = liveness and liveness.known and not liveness.ended() and waited < SILENCE_S
            if waited > PATIENCE_S and not stands_still:
                raise Lost("no drive answers at its window")
            self._doorbell.ring()
            self._doorbell.wait(1e-3)
        assert self._end.identity is not None
        self.identity = self._end.identity

    def _submit(self, command: Command, submit_ns: int) -> Future[Completion]:
        """Submit a command that fits a slot."""
        return self.request(encode(command), submit_ns)

    def request(self, request: Request, submit_ns: int) -> Future[Completion]:
        """The same for a request that is encoded already, whatever it says."""
        future = Pending(self._reap)
        with self._submitting:
            while not self.lost and not self._end.room:
                with suppress(IndexError):  # another thread has ended the last one
                    self._reap(self._waiting[0])
            if self.lost:
                future.set_result(path_lost(self.lost))
                return future
            self._waiting.append(future)
            try:
                self._end.submit(request, submit_ns)
                self._doorbell.ring()
            except (ValueError, OSError) as error:
                if isinstance(error, OSError) and error.errno not in _FULL:
                    self._fail(error)
                    return future
                with suppress(ValueError):  # nothing was begun: it did not fit, or the window's memory is full
                    self._waiting.remove(future)
                raise
        return future

    def close(self) -> None:
        """Let what is under way end, then let go of the window."""
        for future in list(self._waiting):
            self._reap(future)
        if self._close:
            self._close()

    def _reap(self, future: Future[Completion]) -> None:
        """Complete requests until this one is; one thread at a time looks for completions."""
        while not future.done():
            with self._turn:
                self._turn.wait_for(lambda: future.done() or not self._reaping)
                if future.done():
                    return
                self._reaping = True
            try:
                done = self._next()
                with self._ending:
                    if not self.lost:  # else it has ended with the others
                        self._waiting.popleft().set_result(done)
            except OSError as error:
                self._fail(error)
            finally:
                with self._turn:
                    self._reaping = False
                    self._turn.notify_all()

    def _next(self) -> Completion:
        """The next completion; raises Lost when the drive has ended. One that stands still is waited for: it goes on
        where it was, and to give it anything again would cost modelled time."""
        if self.lost:
            raise self.lost
        began = looked = moved = time.perf_counter()
        beat = -1
        while (done := self._end.poll()) is None:
            now = time.perf_counter()
            if now - began > SPIN_S:
                self._doorbell.wait(0.02)
            else:
                os.sched_yield()
            if now - looked > LOOK_S:
                looked, before, beat = now, beat, self._end.look()
                if beat != before:
                    moved = now
                elif now - moved > PATIENCE_S and self._liveness.ended():
                    raise Lost("its process has ended")
                elif now - moved > SILENCE_S:
                    raise Silent(f"its firmware has not been heard of for {SILENCE_S:g} s")
        return done

    def _fail(self, error: OSError) -> None:
        """The drive is gone: end everything that is under way."""
        with self._ending:
            self._lost = self._lost or (error if isinstance(error, Lost) else self._reason(error))
            while self._waiting:
                self._waiting.popleft().set_result(path_lost(self._lost))

    def _reason(self, error: OSError) -> Lost:
        """Why the drive's end of the doorbell closed: it has ended, or another host is about to attach."""
        deadline = time.monotonic() + HANDOVER_S
        while time.monotonic() < deadline and not self._liveness.ended():
            try:
                self._end.look()
            except Lost as lost:
                return lost
            except OSError:
                break
            time.sleep(0.002)
        return Lost(f"its firmware is gone ({error})")


def path_lost(lost: Lost) -> Completion:
    """The completion of a command whose drive is lost."""
    return Completion(status=Status.PATH_LOST, reason=str(lost))
