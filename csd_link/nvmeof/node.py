"""A `Device` over a node of Linux's NVMe driver (/dev/ng0n3): a drive's namespace of sequences."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from csd_io.passthrough import Passthrough, VendorCommand
from csd_io.queue import aligned
from csd_link.host_end import AttachedDrive, DriveLostError, Pending, path_lost
from csd_link.nvmeof.commands import DO_NOT_RETRY, RETRIED, RETRY_S
from csd_link.nvmeof.pdu import Buffer
from csd_link.nvmeof.sequences import (
    FIELDS_BYTES,
    FRAME,
    LOST_SESSION,
    UNKNOWN_SESSION,
    EncodedCommand,
    Op,
    decode_attach,
    decode_frame,
    dwords,
    frame_bytes,
)
from csd_link.window import Identity
from csd_spec import Command, Completion

_DELAY_S = 0.05  # before a retry; Linux connects again every 10 s (--reconnect-delay of nvme connect)
_ATTACH_BYTES = 1 << 16
_PATH_RELATED = 3  # status code type


class Line(Protocol):
    """Interface to the namespace; see `csd_io.passthrough.Passthrough`."""

    max_bytes: int
    how: str

    def begin(self, commands: list[VendorCommand]) -> None: ...

    def wait(self) -> list[int]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _PendingCommand:
    """A command without a completion; `parts` are its entry and its arrays."""

    number: int
    parts: list[Buffer]
    future: Future[Completion]


class NodeDrive(AttachedDrive):
    """A drive connected through Linux's initiator or as a local controller. One command is in flight at a time.

    While Linux reconnects, a command fails with a path-related status, and is submitted again with its number: the
    drive executes it only once. A drive that does not know the session has restarted, and is lost.

    Attributes:
        how: Name of the interface in use, for display.

    """

    def __init__(self, path: Path, opened: Callable[[Path], Line] = Passthrough) -> None:
        """Attach; raises DriveLostError if no drive answers there."""
        self.path = path
        self._lock = threading.Lock()
        self._waiting: deque[_PendingCommand] = deque()
        self._numbers = 0
        try:
            self._line = opened(path)
        except OSError as error:
            raise DriveLostError(f"no drive at {path}: {error.strerror}") from error
        self.how = self._line.how
        self._out, self._in = aligned(self._line.max_bytes), aligned(self._line.max_bytes)
        try:
            self._session, self.identity = self._attach()
        except (OSError, ValueError, struct.error) as error:
            self._line.close()
            raise DriveLostError(f"{path} is not a namespace of sequences: {error}") from error

    @property
    def max_bytes(self) -> int:
        """Limit of the drive, and of Linux for one command."""
        return min(super().max_bytes, self._line.max_bytes - FIELDS_BYTES)

    def _submit(self, command: Command, submit_ns: int) -> Future[Completion]:
        encoded = EncodedCommand.of(command, self.max_bytes)
        future = Pending(self._poll_completions)
        with self._lock:
            if self._lost:
                future.set_result(path_lost(self._lost))
                return future
            self._waiting.append(_PendingCommand(self._numbers, encoded.parts(self._numbers, submit_ns), future))
            self._numbers += 1
            if len(self._waiting) == 1:
                self._begin()
        return future

    def close(self) -> None:
        """Wait for all commands, and close the node."""
        with self._lock:
            while self._waiting:
                self._end_first()
            if not self._lost:
                self._line.begin([VendorCommand(Op.DETACH, self._in[:0], self._dwords(0, 0))])
                self._line.wait()
            self._line.close()

    def _attach(self) -> tuple[int, Identity]:
        data = self._in[:_ATTACH_BYTES]
        if status := self._repeat([VendorCommand(Op.ATTACH, data, (_ATTACH_BYTES,))]):
            raise OSError(_words(status))
        return decode_attach(data)

    def _begin(self) -> None:
        """Submit the first pending command, and fetch its completion."""
        first, size = self._waiting[0], 0
        for part in first.parts:
            self._out[size : size + len(part)] = part
            size += len(part)
        self._in[: FRAME.size] = bytes(FRAME.size)
        submit = VendorCommand(Op.SUBMIT, self._out[:size], self._dwords(first.number, size))
        self._line.begin([submit, self._fetch(first.number, self._in)])

    def _fetch(self, number: int, into: memoryview, offset: int = 0) -> VendorCommand:
        return VendorCommand(Op.FETCH, into, self._dwords(number, len(into), offset))

    def _dwords(self, number: int, size: int, offset: int = 0) -> tuple[int, ...]:
        return dwords(size, offset, number, self._session)

    def _poll_completions(self, future: Future[Completion]) -> None:
        """Wait for completions until this command is done."""
        while not future.done():
            with self._lock:
                if not future.done():
                    self._end_first()

    def _end_first(self) -> None:
        """Wait for the first command, and submit the next one."""
        first, deadline = self._waiting[0], time.monotonic() + RETRY_S
        while failed := next((status for status in self._line.wait() if status), 0):
            if not _is_retried(failed) or time.monotonic() > deadline:
                self._fail(failed)
                return
            time.sleep(_DELAY_S)
            self._begin()
        frame = self._frame(first.number)
        if frame is None:
            return
        self._waiting.popleft()
        if self._waiting:
            self._begin()
        first.future.set_result(decode_frame(frame))

    def _frame(self, number: int) -> bytearray | None:
        """Fetch the frame of a completion, in parts if necessary; None if the drive is lost meanwhile."""
        size = frame_bytes(self._in)
        frame = bytearray(self._in[:size])
        while len(frame) < size:
            part = self._in[: min(size - len(frame), len(self._in))]
            if status := self._repeat([self._fetch(number, part, len(frame))]):
                self._fail(status)
                return None
            frame += part
        return frame

    def _repeat(self, commands: list[VendorCommand]) -> int:
        """Execute a command, again while the drive asks to retry it; returns its status."""
        deadline = time.monotonic() + RETRY_S
        while True:
            self._line.begin(commands)
            (status,) = self._line.wait()
            if not _is_retried(status) or time.monotonic() > deadline:
                return status
            time.sleep(_DELAY_S)

    def _fail(self, status: int) -> None:
        self._lost = DriveLostError(
            LOST_SESSION if status == UNKNOWN_SESSION | DO_NOT_RETRY else f"{self.path}: {_words(status)}"
        )
        while self._waiting:
            self._waiting.popleft().future.set_result(path_lost(self._lost))


def _is_retried(status: int) -> bool:
    """Whether a command is sent again: Linux connects again meanwhile, or the drive asks for it."""
    return status > 0 and (status >> 8 & 7 == _PATH_RELATED or status in RETRIED)


def _words(status: int) -> str:
    return os.strerror(-status) if status < 0 else f"NVMe status {status:#05x}"
