"""Mutated PDUs and commands on an NVMe/TCP controller with real firmware, in every state of a connection.

A connection of the fuzzer begins as a good host's, up to one of `STATES`. Then several PDUs follow, most of them
mutated, and the fuzzer closes its direction: the controller has to close the connection. An honest host of the same
drive reads all that it has stored before, between and after them. The fuzzer writes to blocks and sequences of its own.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from csd_firmware import Firmware
from csd_firmware.namespace import Namespace
from csd_firmware.process.fifo_lock import FifoLock
from csd_firmware.process.listen import BLOCKS_NSID, SEQUENCES_NSID, subsystem_of
from csd_link.nvmeof.commands import Code, Sqe
from csd_link.nvmeof.device import Endpoint, NvmeDrive
from csd_link.nvmeof.host import NvmeHost
from csd_link.nvmeof.host_queue import StatusError
from csd_link.nvmeof.identify import Limits
from csd_link.nvmeof.listen import Listen
from csd_link.nvmeof.nvm import LBA_BYTES, Nvm
from csd_link.nvmeof.target import Target
from csd_link.served_drive import ServedDrive
from csd_link.window import WindowLayout
from csd_spec import KvAppend, KvExist, KvName, KvRead, SeqCreate
from csd_spec.arrays import KEY
from ftl import Nand
from vcsd.progress import Tick
from vcsd_eval.verify.fuzz import DRIVE, Findings
from vcsd_eval.verify.nvme_mutants import OWN_LBA, STATES, Attacker, exchange, statuses

SETTLE_S = 10.0
HANG_S = 30.0  # limit for closing a connection after its host has closed its direction
RENEW = 5000  # PDUs that one drive gets
LOOK = 64  # connections between two reads of the honest host
LIMITS = Limits(in_capsule_bytes=8192, transfer_bytes=1 << 20, in_flight_bytes=8 << 20)
LAYOUT = WindowLayout(depth=4, slot_blocks=64)


class Honest:
    """A host that has stored blocks, rows and a name, and reads them."""

    def __init__(self, port: int, nqn: str, draw: random.Random) -> None:
        with ExitStack() as undo:
            self._host = NvmeHost("127.0.0.1", port, nqn)
            undo.callback(self._host.close)
            self._device = NvmeDrive(lambda: Endpoint("127.0.0.1", port, nqn))
            undo.callback(self._device.close)
            self._store(draw)
            self.stored = self.read()
            self._undo = undo.pop_all()

    def _store(self, draw: random.Random) -> None:
        for lba in range(OWN_LBA):
            self._host.io.command(Sqe(Nvm.WRITE, nsid=BLOCKS_NSID, cdw10=lba), [draw.randbytes(LBA_BYTES)])
        rows = np.frombuffer(draw.randbytes(40 * 2 * 16), np.uint8).astype(np.float16).reshape(40, 2, 16)
        self._key = np.frombuffer(draw.randbytes(16), KEY)
        self._seqs = tuple(self._done(SeqCreate(1, 1, 2, 16, 512))[0].tolist())
        self._done(KvAppend(self._seqs, 0, np.array([len(rows)]), rows, rows))
        self._done(KvName(self._seqs, np.array([len(rows)]), self._key))

    def _done(self, command: Any) -> Any:
        done = self._device.submit(command, 0).result()
        if done.status:
            raise ConnectionError(f"{type(command).__name__}: {done.status.name}: {done.reason}")
        return done.data

    def read(self) -> list[bytes]:
        """Bytes of all that it has stored; raises an OSError if it is not served."""
        blocks = [
            bytes(self._host.io.command(Sqe(Nvm.READ, nsid=BLOCKS_NSID, cdw10=lba), (), LBA_BYTES).data)
            for lba in range(OWN_LBA)
        ]
        arrays = *self._done(KvRead(self._seqs, 0)), *self._done(KvExist(self._key))
        return [*blocks, *(array.tobytes() for array in arrays)]

    def close(self) -> None:
        self._undo.close()


class NvmeFuzzWorld:
    """A drive with an honest host and an attacker, and the resources that connections may leak."""

    def __init__(self, draw: random.Random) -> None:
        self._before = threads_and_descriptors()
        self.firmware, turns = Firmware(DRIVE, Nand(DRIVE.geometry)), FifoLock()
        drive = ServedDrive(name="fuzz", spec=DRIVE, layout=LAYOUT, listen=Listen("127.0.0.1", 0, ("fuzz",)))
        namespace = Namespace(self.firmware, turns)
        self.subsystem = subsystem_of(drive, self.firmware, namespace, turns, draw.randbytes(32))
        with ExitStack() as undo:
            self.target = Target(self.subsystem, "127.0.0.1", 0, LIMITS)
            self.target.start()
            undo.callback(self.target.stop)
            self.honest = Honest(self.target.port, self.subsystem.nqn, draw)
            undo.callback(self.honest.close)
            self.attacker = Attacker(self.target.port, self.subsystem.nqn, draw)
            undo.callback(self.attacker.close)
            self._undo = undo.pop_all()
        self._serving = *self._held()[:-2], 0, True  # the honest host's last data may not be given back yet

    def check(self, findings: Findings) -> None:
        """Look whether the honest host has its data."""
        try:
            if self.honest.read() != self.honest.stored:
                findings.note("changes", "the honest host reads other data than it has stored")
        except OSError as error:
            findings.note("changes", f"the honest host is not served: {error}")

    def close(self, findings: Findings) -> None:
        """Look for what ended connections have left, end all, and look again."""
        self.check(findings)
        _settle(self._held, self._serving, findings)
        if self.firmware.failure:
            findings.note("crashes", self.firmware.failure)
        self._undo.close()
        _settle(threads_and_descriptors, self._before, findings)

    def _held(self) -> tuple[object, ...]:
        """Resources that a connection may leak."""
        sessions: Any = self.subsystem.namespaces[SEQUENCES_NSID]
        bounded = len(sessions) <= sessions.most_sessions and sessions.kept_bytes <= sessions.most_kept_bytes
        controllers = self.target.controllers
        return (
            threads_and_descriptors(),
            self.target.connections,
            len(controllers),
            controllers.in_flight_bytes,
            bounded,
        )

    def internal_errors(self) -> list[str]:
        """Internal errors of sequence commands since the last call."""
        refused = self.firmware.state.history.errors
        reasons = [error["reason"] for error in tuple(refused) if error["status_field"] == Code.INTERNAL_ERROR]
        refused.clear()
        return reasons


def _settle(held: Callable[[], object], wanted: object, findings: Findings) -> None:
    """Wait until connections hold the same resources as before: their threads end shortly after them."""
    deadline = time.monotonic() + SETTLE_S
    while (now := held()) != wanted:
        if time.monotonic() > deadline:
            findings.note("leaks", f"threads and descriptors, connections, controllers, bytes: {now}, before {wanted}")
            return
        time.sleep(0.001)


def threads_and_descriptors() -> tuple[int, int]:
    """How many this process has."""
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


@contextmanager
def escapes(note: Callable[[object], None]) -> Iterator[None]:
    """Note exceptions that leave a thread, for the time of a block."""
    before = threading.excepthook
    threading.excepthook = lambda args: note(f"{args.exc_type.__name__}: {args.exc_value}")
    try:
        yield
    finally:
        threading.excepthook = before


def bench_nvme_fuzz(pdus: int, seed: int, tick: Tick) -> dict[str, Any]:
    """Send at least `pdus` mutated PDUs.

    crashes: exceptions that leave a connection, internal errors, and answers that are not PDUs. hangs: connections that
    the controller does not take, or does not close. leaks: threads, descriptors, controllers, sessions, bytes in
    flight. state_changes: reads of the honest host that fail, or return other data than it has stored.
    """
    draw, findings, sent, began = random.Random(seed), Findings(), 0, time.perf_counter()
    by_state = dict.fromkeys(STATES, 0)
    with escapes(lambda what: findings.note("crashes", what)):
        while sent < pdus:
            world, last, number = NvmeFuzzWorld(draw), sent, 0
            with ExitStack() as undo:
                undo.callback(world.close, findings)
                while sent < min(pdus, last + RENEW):
                    state = STATES[number % len(STATES)]
                    count = _connection(world, state, findings)
                    by_state[state] += count
                    sent, number = sent + count, number + 1
                    if number % LOOK == 0:
                        world.check(findings)
            tick(None)
    return {
        "pdus": sent,
        "crashes": findings.crashes,
        "hangs": findings.hangs,
        "leaks": findings.leaks,
        "state_changes": findings.changes,
        "successes": findings.accepted,
        "pdus_per_s": sent / (time.perf_counter() - began),
        **{f"pdus_{state}": count for state, count in by_state.items()},
        "notes": findings.notes,
    }


def _connection(world: NvmeFuzzWorld, state: str, findings: Findings) -> int:
    """One connection of the attacker; how many PDUs it has sent after it was in the state."""
    try:
        line, pdus = world.attacker.begin(state)
    except (OSError, StatusError) as error:
        findings.note("hangs", f"{state}: a good host cannot begin a connection: {error}")
        return 1
    with line:
        answer = exchange(line, b"".join(pdus), HANG_S)
    said = f"{state}: {[pdu[:72].hex() for pdu in pdus]}"
    if answer is None:
        findings.note("hangs", said)
        return len(pdus)
    for reason in world.internal_errors():
        findings.note("crashes", f"{reason}: {said}")
    try:
        ended = [status & 0x7FF for status in statuses(answer)]
    except ValueError as error:
        findings.note("crashes", f"{error}: {said}")
        return len(pdus)
    findings.accepted += ended.count(Code.SUCCESS)
    if Code.INTERNAL_ERROR in ended:
        findings.note("crashes", f"internal error: {said}")
    return len(pdus)
