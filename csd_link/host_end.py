"""Host side of a window, and a `Device` that uses it."""

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
from csd_link.doorbell import Doorbell, Polling
from csd_link.lease import describe_process, holder
from csd_link.liveness import Liveness
from csd_link.splitting import submit_in_parts
from csd_link.window import (
    BLOCK_BYTES,
    BODY_BYTES,
    DRIVE_HEADER,
    HOST_HEADER,
    BlockKind,
    ControlBlock,
    Identity,
    WindowMedium,
    next_generation,
    unpack,
)
from csd_link.wire import ENTRY, WireError, WireRequest, decode_completion, encode, pack_entry
from csd_spec import Command, Completion, DriveSpec, Status

POLL_INTERVAL_S = 0.05  # check the drive's heartbeat while waiting
SPIN_S = 200e-6  # spin time before a wait; the processor is yielded to other processes meanwhile
HANDOVER_S = 0.3  # from a closed doorbell until the next host has attached
HEARTBEAT_TIMEOUT_S = 0.8  # without a heartbeat for this time, the drive's process is checked
LOST_TIMEOUT_S = 60.0  # after this time without a heartbeat, a drive of unknown state is lost
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DriveLostError(ConnectionError):
    """The drive's firmware exited or restarted, or another host took the window."""


class TakenError(DriveLostError):
    """Another host has the window; attaching again would take it back, in a loop."""


class HeartbeatTimeoutError(DriveLostError):
    """No heartbeat within the timeout: the drive may have exited, or be stopped and continue later."""


class AttachedDrive(ABC):
    """A served drive that a host has attached to. A subclass sets `identity`, and `_lost` when the drive is lost.

    Attributes:
        identity: Description from the drive's header.

    """

    identity: Identity
    _lost: DriveLostError | None = None

    @property
    def lost(self) -> DriveLostError | None:
        """Why the drive is lost; None if it is not."""
        return self._lost

    @property
    def name(self) -> str:
        return self.identity.name

    @property
    def spec(self) -> DriveSpec:
        return self.identity.spec

    @property
    def max_bytes(self) -> int:
        """Limit on a command's payload and on its data, bytes: the size of a slot."""
        return self.identity.layout.slot_bytes

    def submit(self, command: Command, submit_ns: int) -> Future[Completion]:
        return submit_in_parts(self._submit, command, submit_ns, self.max_bytes)

    @abstractmethod
    def _submit(self, command: Command, submit_ns: int) -> Future[Completion]:
        """Submit a command of at most `max_bytes`; raises ValueError for a larger one."""

    @abstractmethod
    def close(self) -> None:
        """Wait for all requests in flight, then close the connection."""


class WindowHost:
    """Submits requests and returns completions in order; has no threads and no clock, and must be polled."""

    def __init__(self, medium: WindowMedium) -> None:
        self.medium = medium
        self.identity: Identity | None = None
        self.host = self.drive = 0  # generations
        self.begun = self.ended = 0  # requests submitted, completed in this generation
        self.attached = False
        self.beat = -1

    def attach(self) -> bool:
        """Try to attach; returns whether the drive has answered."""
        header = self._header()
        if header is None or not header.drive:
            return False
        if self.attached:
            raise DriveLostError("attached before: make another end")
        if header.drive != self.drive:
            identity = Identity.from_json(header.body)
            if identity.layout.blocks > self.medium.blocks:
                raise ValueError(f"window of {identity.layout.blocks} blocks: the medium has {self.medium.blocks}")
            before = unpack(self.medium.read(HOST_HEADER))
            generation = before.host if before and before.kind is BlockKind.HOST else 0
            self.identity, self.drive = identity, header.drive
            self.host = next_generation(generation, header.host)
            self.medium.write(
                HOST_HEADER, ControlBlock(BlockKind.HOST, self.host, self.drive, 0, describe_process()).pack()
            )
        self.attached = header.host == self.host
        return self.attached

    @property
    def has_free_slot(self) -> bool:
        """Whether another request may be submitted."""
        assert self.identity is not None
        return self.begun - self.ended < self.identity.layout.depth

    def submit(self, request: WireRequest, submit_ns: int) -> int:
        """Submit a request if a slot is free; returns its sequence number. Raises ValueError if it is too large."""
        assert self.attached and self.has_free_slot and self.identity is not None
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
        block = ControlBlock(BlockKind.REQUEST, self.host, self.drive, sequence, body)
        self.medium.write(layout.request(sequence), block.pack())
        self.begun += 1
        return sequence

    def poll(self) -> Completion | None:
        """Return the completion of the oldest request in flight; None if it is not available."""
        assert self.identity is not None
        if self.ended == self.begun:
            return None
        layout, sequence = self.identity.layout, self.ended
        block = unpack(self.medium.read(layout.completion(sequence)))
        awaited = BlockKind.COMPLETION, self.host, self.drive, sequence
        if block is None or (block.kind, block.host, block.drive, block.sequence) != awaited:
            return None
        try:
            return self._completed(block, sequence)
        except WireError as error:
            return Completion(status=Status.TRANSFER_ERROR, reason=f"from the drive: {error}")
        finally:
            assert self.ended < self.begun, "a request completed twice"
            self.ended += 1  # last: another thread may submit, and its completion would reuse the slot

    def _completed(self, block: ControlBlock, sequence: int) -> Completion:
        """Decode the completion in a block, and read its data; raises WireError."""
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

    def check_heartbeat(self) -> int:
        """Return the drive's heartbeat; raises DriveLostError if another drive or host has the window."""
        header = self._header()
        if header is None:  # torn: being written
            return self.beat
        if header.drive != self.drive:
            raise DriveLostError("its firmware has restarted")
        if header.host != self.host:
            raise TakenError(f"another host has taken its window: {holder(self.medium.read(HOST_HEADER))}")
        self.beat = header.sequence
        return self.beat

    def _header(self) -> ControlBlock | None:
        header = unpack(self.medium.read(DRIVE_HEADER))
        return header if header and header.kind is BlockKind.DRIVE else None


class Pending(Future[Completion]):
    """A completion that the waiting thread polls for, so that no other thread has to be woken."""

    def __init__(self, reap: Callable[[Future[Completion]], None]) -> None:
        super().__init__()
        self._poll_completions = reap

    def result(self, timeout: float | None = None) -> Completion:
        self._poll_completions(self)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._poll_completions(self)
        return super().exception(0)


class WindowDrive(AttachedDrive):
    """A drive behind a window.

    When the drive is lost, all commands in flight and all later ones complete with PATH_LOST.
    """

    def __init__(
        self, medium: WindowMedium, doorbell: Doorbell | None = None, close: Callable[[], None] | None = None
    ) -> None:
        """Attach to the drive; raises DriveLostError if it does not answer."""
        self._doorbell, self._close, self._end = doorbell or Polling(), close, WindowHost(medium)
        self._turn, self._reaping = threading.Condition(), False
        self._submitting, self._ending = threading.Lock(), threading.Lock()
        self._waiting: deque[Future[Completion]] = deque()
        try:
            self._attach()
        except OSError as error:
            if isinstance(error, DriveLostError) or error.errno in _FULL:
                raise
            raise DriveLostError(f"its firmware is gone ({error})") from error
        self._liveness = Liveness(self.name)

    def _attach(self) -> None:
        began, liveness = time.monotonic(), None
        while not self._end.attach():
            liveness = liveness or (self._end.identity and Liveness(self._end.identity.name))
            waited = time.monotonic() - began
            stands_still = liveness and liveness.is_known and not liveness.has_exited() and waited < LOST_TIMEOUT_S
            if waited > HEARTBEAT_TIMEOUT_S and not stands_still:
                raise DriveLostError("no drive answers at its window")
            self._doorbell.ring()
            self._doorbell.wait(1e-3)
        assert self._end.identity is not None
        self.identity = self._end.identity

    def _submit(self, command: Command, submit_ns: int) -> Future[Completion]:
        """Submit a command that fits a slot."""
        return self.request(encode(command), submit_ns)

    def request(self, request: WireRequest, submit_ns: int) -> Future[Completion]:
        """Submit an encoded request, without validating it."""
        future = Pending(self._poll_completions)
        with self._submitting:
            while not self.lost and not self._end.has_free_slot:
                with suppress(IndexError):  # another thread has completed the last one
                    self._poll_completions(self._waiting[0])
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
                with suppress(ValueError):  # nothing was submitted: it did not fit, or memory is full
                    self._waiting.remove(future)
                raise
        return future

    def close(self) -> None:
        """Wait for all requests in flight, then close the window."""
        for future in list(self._waiting):
            self._poll_completions(future)
        if self._close:
            self._close()

    def _poll_completions(self, future: Future[Completion]) -> None:
        """Poll completions until `future` is done; one thread polls at a time."""
        while not future.done():
            with self._turn:
                self._turn.wait_for(lambda: future.done() or not self._reaping)
                if future.done():
                    return
                self._reaping = True
            try:
                done = self._next()
                with self._ending:
                    if not self.lost:  # otherwise `_fail` has completed it
                        self._waiting.popleft().set_result(done)
            except OSError as error:
                self._fail(error)
            finally:
                with self._turn:
                    self._reaping = False
                    self._turn.notify_all()

    def _next(self) -> Completion:
        """Wait for the next completion; raises DriveLostError if the drive has exited.

        A stopped drive is waited for: it continues where it was, and submitting again would cost simulated time.
        """
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
            if now - looked > POLL_INTERVAL_S:
                looked, before, beat = now, beat, self._end.check_heartbeat()
                if beat != before:
                    moved = now
                elif now - moved > HEARTBEAT_TIMEOUT_S and self._liveness.has_exited():
                    raise DriveLostError("its process has exited")
                elif now - moved > LOST_TIMEOUT_S:
                    raise HeartbeatTimeoutError(f"no heartbeat from its firmware for {LOST_TIMEOUT_S:g} s")
        return done

    def _fail(self, error: OSError) -> None:
        """Mark the drive as lost, and complete all requests in flight."""
        with self._ending:
            self._lost = self._lost or (error if isinstance(error, DriveLostError) else self._reason(error))
            while self._waiting:
                self._waiting.popleft().set_result(path_lost(self._lost))

    def _reason(self, error: OSError) -> DriveLostError:
        """Determine why the doorbell closed: the drive has exited, or another host is attaching."""
        deadline = time.monotonic() + HANDOVER_S
        while time.monotonic() < deadline and not self._liveness.has_exited():
            try:
                self._end.check_heartbeat()
            except DriveLostError as lost:
                return lost
            except OSError:
                break
            time.sleep(0.002)
        return DriveLostError(f"its firmware is gone ({error})")


def path_lost(lost: DriveLostError) -> Completion:
    """Completion of a command whose drive is lost."""
    return Completion(status=Status.PATH_LOST, reason=str(lost))
