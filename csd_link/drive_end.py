"""Controller side of a window: takes requests in order, carries them out and completes them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from csd_io.crc import crc32
from csd_link.doorbell import Doorbell
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
from csd_link.wire import (
    ENTRY,
    Buffer,
    WireError,
    WireRequest,
    check_payload,
    decode,
    encode_completion,
    unpack_entry,
)
from csd_spec import Command, Completion, Status


class Service(Protocol):
    """Command processor behind a window."""

    def attach(self) -> None:
        """Called when a new host attaches."""
        ...

    def refuse(self, command: str, status: Status, reason: str, submit_ns: int) -> Completion:
        """Completion for an invalid command; recorded in the error log."""
        ...

    def step(self, command: Command, submit_ns: int, max_bytes: int) -> Completion:
        """Carry out a command; reject one whose completion would have more than `max_bytes` of data."""
        ...


HEARTBEAT_INTERVAL_S = 0.1
SPIN_S = 200e-6  # spin time before a wait; the processor is yielded to other processes meanwhile
POLL_INTERVAL_S = 0.002  # check for a new host while one is attached


def carry_out(service: Service, read: Callable[[], tuple[WireRequest, int]], max_bytes: int) -> Completion:
    """Return the completion of a request. Any input gives a completion: a host cannot stop the drive.

    Args:
        read: Returns the request and its submission time (simulated, ns); raises WireError.
    """
    submit_ns = 0
    try:
        request, submit_ns = read()
        return service.step(decode(request), submit_ns, max_bytes)
    except WireError as error:
        return service.refuse("undecoded", error.status, str(error), submit_ns)
    except Exception as error:  # noqa: BLE001 - a bug of the firmware is an answer, too
        reason = f"firmware: {type(error).__name__}: {error}"
        return service.refuse("failed", Status.INTERNAL_ERROR, reason, submit_ns)


class WindowController:
    """Processes one window's requests one after the other; has no threads and no clock."""

    def __init__(self, medium: WindowMedium, identity: Identity, service: Service) -> None:
        """Start a new generation: requests in flight are dropped, and a host has to attach again."""
        if identity.layout.blocks > medium.blocks:
            raise ValueError(f"window of {identity.layout.blocks} blocks: the medium has {medium.blocks}")
        self.medium, self.layout, self.service = medium, identity.layout, service
        self._identity = identity.to_json()
        before = unpack(medium.read(DRIVE_HEADER))
        self.drive = next_generation(before.drive if before and before.kind is BlockKind.DRIVE else 0)
        self.host = 0  # generation of the attached host
        self.sequence = self._beats = 0
        self.beat()

    def beat(self) -> None:
        """Write the heartbeat."""
        self._beats += 1
        header = ControlBlock(BlockKind.DRIVE, self.host, self.drive, self._beats, self._identity)
        self.medium.write(DRIVE_HEADER, header.pack())

    def accept_host(self) -> bool:
        """Attach a new host if its header has appeared; returns whether there was one."""
        header = unpack(self.medium.read(HOST_HEADER))
        if (
            header is None
            or header.kind is not BlockKind.HOST
            or header.drive != self.drive
            or header.host == self.host
        ):
            return False
        self.host, self.sequence = header.host, 0
        self.service.attach()
        self.beat()
        return True

    def serve(self) -> bool:
        """Carry out the next request; returns whether there was one."""
        block = unpack(self.medium.read(self.layout.request(self.sequence)))
        awaited = BlockKind.REQUEST, self.host, self.drive, self.sequence
        if not self.host or block is None or (block.kind, block.host, block.drive, block.sequence) != awaited:
            return False
        done = carry_out(self.service, partial(self._request, block.body), self.layout.slot_bytes)
        body, data = encode_completion(done, crc32)
        if len(body) + len(data) <= BODY_BYTES:
            body += data
        else:
            try:
                self.medium.write(self.layout.to_host(self.sequence), data)
            except OSError as error:  # memory or disk is full: report it in the completion's block, which exists
                reason = f"window: {error.strerror}: {len(data):,} bytes do not fit"
                refused = self.service.refuse("data", Status.TRANSFER_ERROR, reason, done.submit_ns)
                body, _ = encode_completion(refused, crc32)
        answer = ControlBlock(BlockKind.COMPLETION, self.host, self.drive, self.sequence, body)
        self.medium.write(self.layout.completion(self.sequence), answer.pack())
        self.sequence += 1
        return True

    def _request(self, body: bytes | bytearray | memoryview) -> tuple[WireRequest, int]:
        opcode, parameters, submit_ns, size, crc = unpack_entry(body)
        payload: Buffer
        if size <= BODY_BYTES - ENTRY.size:
            payload = bytearray(body[ENTRY.size : ENTRY.size + size])
        elif size <= self.layout.slot_bytes:
            blocks = self.medium.read(self.layout.to_drive(self.sequence), -(-size // BLOCK_BYTES))
            del blocks[size:]
            payload = blocks
        else:
            raise WireError(f"payload of {size} bytes: this window's slots hold {self.layout.slot_bytes}")
        return check_payload(WireRequest(opcode, parameters, payload), size, crc), submit_ns


class WindowServer:
    """Serves a window controller in a thread, with a heartbeat from a second thread."""

    def __init__(self, end: WindowController, doorbell: Doorbell) -> None:
        self.end, self._doorbell = end, doorbell
        self._stopping = threading.Event()
        self._header = threading.Lock()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._serve, self._beat)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Finish the current request and stop."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self._doorbell.close()

    def _serve(self) -> None:
        try:
            self._work()
        finally:
            self._stopping.set()  # no heartbeat without a serving thread

    def _work(self) -> None:
        busy = looked = 0.0
        while not self._stopping.is_set():
            now = time.perf_counter()
            if self.end.serve():
                busy = time.perf_counter()
                self._doorbell.ring()
                continue
            if now - looked > POLL_INTERVAL_S:
                looked = now
                with self._header:
                    if self.end.accept_host():
                        busy = now
                        self._doorbell.ring()
                        continue
            if now - busy > SPIN_S:
                self._doorbell.wait(HEARTBEAT_INTERVAL_S)
            else:
                os.sched_yield()

    def _beat(self) -> None:
        while not self._stopping.wait(HEARTBEAT_INTERVAL_S):
            with self._header:
                self.end.beat()
