"""Signals whose handlers raise, at random moments of commands of a drive in the same process."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from csd_firmware import InProcessDrive
from csd_io.medium import KINDS, Kind, Medium
from csd_spec import (
    Attend,
    Command,
    Completion,
    Flush,
    GetLog,
    KvAppend,
    KvCrop,
    KvFree,
    KvRead,
    LogPage,
    SeqCreate,
    SeqFork,
    Status,
)
from vcsd.options import MAX_SEED
from vcsd.progress import Tick, no_tick, progress
from vcsd.tables import flat_table
from vcsd_eval.experiment import Outcome
from vcsd_eval.sweep import sweep
from vcsd_eval.verify.random_host import DIM, DRIVE, HEADS
from vcsd_eval.verify.tested_storage import CACHE_BYTES

SIGNALS = signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT
COMMANDS = 40  # of a life
MAX_PAUSE_S = 0.004  # between two signals
MAX_SEQUENCES = 4
VERBS = "create", "append", "append", "append", "attend", "attend", "crop", "free", "fork", "flush"

Rows = NDArray[Any]  # K of a sequence, (S, H, d) FP16; V is its negative


class Interrupt(Exception):
    """Raised by the handlers."""


@dataclass(frozen=True, slots=True)
class DriveLife:
    """One drive, opened in a folder, used, closed and opened again."""

    number: int
    medium: Kind
    signum: int
    seed: int


class SignalHost:
    """A host of one drive, in the main thread.

    Attributes:
        rows: Contents of the drive, by handle.
        since_flush: States of each sequence since the last flush: after a loss of power it is in one of them.
    """

    def __init__(self, device: InProcessDrive, seed: int) -> None:
        self.device, self._draw, self._generator = device, random.Random(seed), np.random.default_rng(seed)
        self.rows: dict[int, Rows] = {}
        self.since_flush: dict[int, list[Rows | None]] = {}
        self.interrupted = self.wrong = 0

    def step(self, armed: threading.Event) -> None:
        """Give the drive a random command, which a signal may interrupt, and find out what it did."""
        verb = self._draw.choice(VERBS) if self.rows else "create"
        if verb in ("create", "fork") and len(self.rows) >= MAX_SEQUENCES:
            verb = "free"
        command, after = getattr(self, f"_{verb}")()
        before, done = dict(self.rows), None
        try:
            armed.set()
            done = self.device.carry_out(command, 0)
        except Interrupt:
            self.interrupted += 1
        finally:
            armed.clear()
        if done is not None and done.status is Status.CAPACITY_EXCEEDED:
            after = before
        elif done is not None and done.status is not Status.SUCCESS:
            self.wrong += 1
        found = read(self.device)
        new = sorted(found.keys() - before.keys())
        after = {handle if handle >= 0 else (new or [handle])[0]: rows for handle, rows in after.items()}
        states = [after] if done is not None else [before, after]
        self.wrong += not any(same(found, state) for state in states)
        if verb == "flush" and done is not None:
            self.since_flush = {handle: [rows] for handle, rows in found.items()}
        for handle in found.keys() | before.keys():
            self.since_flush.setdefault(handle, [None]).append(found.get(handle))
        self.rows = found

    def _any(self) -> int:
        return self._draw.choice(sorted(self.rows))

    def _new(self, tokens: int) -> Rows:
        return self._generator.standard_normal((tokens, HEADS, DIM)).astype(np.float16)

    # Each returns a command, and the drive's contents after it; a new sequence has the handle -1

    def _create(self) -> tuple[Command, dict[int, Rows]]:
        return SeqCreate(1, 1, HEADS, DIM, 256), self.rows | {-1: self._new(0)}

    def _append(self) -> tuple[Command, dict[int, Rows]]:
        handle, k = self._any(), self._new(self._draw.choice([3, 30, 70]))
        grown = np.concatenate([self.rows[handle], k])
        return KvAppend((handle,), 0, np.array([len(k)]), k, -k), self.rows | {handle: grown}

    def _attend(self) -> tuple[Command, dict[int, Rows]]:
        handle, k, one = self._any(), self._new(1), np.ones(1, np.int64)
        q, grown = np.ascontiguousarray(k[:, :, None]), np.concatenate([self.rows[handle], k])
        return Attend((handle,), 0, q, k, np.negative(k), "dense", 1, one, one), self.rows | {handle: grown}

    def _crop(self) -> tuple[Command, dict[int, Rows]]:
        handle = self._any()
        length = self._draw.randint(0, len(self.rows[handle]))
        return KvCrop((handle,), 0, np.array([length])), self.rows | {handle: self.rows[handle][:length]}

    def _free(self) -> tuple[Command, dict[int, Rows]]:
        handle = self._any()
        return KvFree((handle,)), {other: rows for other, rows in self.rows.items() if other != handle}

    def _fork(self) -> tuple[Command, dict[int, Rows]]:
        handle = self._any()
        length = self._draw.randint(0, len(self.rows[handle]))
        return SeqFork((handle,), np.array([length])), self.rows | {-1: self.rows[handle][:length]}

    def _flush(self) -> tuple[Command, dict[int, Rows]]:
        return Flush(), self.rows


def read(device: InProcessDrive) -> dict[int, Rows]:
    """K of all sequences of a drive; NaN if V does not fit K, or if they cannot be read."""
    found: dict[int, Rows] = {}
    device.submit(GetLog(LogPage.SMART), 0).result()  # an interrupted command may still be in the queue
    for handle in list(device.firmware.ftl.sequences):
        done: Completion = device.submit(KvRead((handle,), 0), 0).result()
        good = done.status is Status.SUCCESS and np.array_equal(done.data[0], np.negative(done.data[1]))
        k: Rows = done.data[0] if good else np.full((1, HEADS, DIM), np.nan, np.float16)
        found[handle] = k
    return found


def same(one: dict[int, Rows], other: dict[int, Rows]) -> bool:
    """Whether two drives hold the same."""
    return one.keys() == other.keys() and all(np.array_equal(one[handle], other[handle]) for handle in one)


@contextmanager
def signalled(signum: int, seed: int) -> Iterator[threading.Event]:
    """Send this process a signal at random moments. Its handler raises Interrupt while the event is set."""
    armed, over, draw = threading.Event(), threading.Event(), random.Random(seed)

    def handle(*_: object) -> None:
        if armed.is_set():
            raise Interrupt

    def send() -> None:
        while not over.wait(draw.random() * MAX_PAUSE_S):
            if armed.wait(MAX_PAUSE_S):
                os.kill(os.getpid(), signum)

    before, hook = signal.signal(signum, handle), sys.unraisablehook

    def report(error: Any) -> None:
        if error.exc_type is not Interrupt:  # one that came inside a callback of the interpreter interrupts nothing
            hook(error)

    sys.unraisablehook = report
    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        yield armed
    finally:
        over.set()
        sender.join()
        signal.signal(signum, before)
        sys.unraisablehook = hook


def live(life: DriveLife, tick: Tick) -> Counter[str]:
    """Use a drive under signals, and open its folder again: after a flush in every other life."""
    with tempfile.TemporaryDirectory(prefix="vcsd-") as scratch:
        path, medium = Path(scratch) / "drive", Medium(life.medium, CACHE_BYTES)
        device = InProcessDrive(DRIVE, path, medium=medium)
        host = SignalHost(device, life.seed)
        with signalled(life.signum, life.seed) as armed:
            for _ in range(COMMANDS):
                host.step(armed)
        failed = bool(device.firmware.ftl.nand.failed)
        flushed = life.number % 2 == 0
        if flushed:
            host.wrong += device.submit(Flush(), 0).result().status is not Status.SUCCESS
        device.close()
        again = InProcessDrive(DRIVE, path, medium=medium)
        found = read(again)
        again.close()
    lost, wrong = judge(host, found, flushed)
    tick(None)
    return Counter(lives=1, lost=lost, wrong=host.wrong + wrong, interrupted=host.interrupted, failed_drives=failed)


def judge(host: SignalHost, found: dict[int, Rows], flushed: bool) -> tuple[int, int]:
    """Count sequences that are lost and wrong after power-on."""
    if flushed:
        return len(host.rows.keys() - found.keys()), int(not same({h: found[h] for h in found}, host.rows))
    lost = wrong = 0
    for handle, states in host.since_flush.items():
        if handle not in found:
            lost += all(state is not None for state in states)
        else:
            wrong += not any(state is not None and np.array_equal(state, found[handle]) for state in states)
    return lost, wrong + len(found.keys() - host.since_flush.keys())


def bench_signals(lives: int, seed: int, jobs: int, tick: Tick = no_tick) -> dict[str, Any]:
    """Use drives on each medium under each signal, `lives` drives in all."""
    pairs = list(product(KINDS, SIGNALS))
    every = [DriveLife(number, *pairs[number % len(pairs)], seed + number) for number in range(lives)]
    total = sum(sweep(live, every, jobs, tick), Counter[str]())
    keys = "lives", "lost", "wrong", "failed_drives", "interrupted"
    names = [signal.Signals(each).name for each in SIGNALS]
    return {key: total[key] for key in keys} | {"signals": names, "media": list(KINDS), "seed": seed}


def experiment(
    lives: Annotated[int, typer.Option(min=1, max=10**6, help="drives to use")] = 600,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="random seed of commands and moments")] = 0,
    workers: Annotated[int, typer.Option(min=1, max=256, help="processes")] = 2,
) -> Outcome:
    """Interrupt in-process drives by signals whose handlers raise: a command is carried out whole or not at all."""
    with progress("lives", lives) as tick:
        result = bench_signals(lives, seed, workers, tick)
    shown = {key: value for key, value in result.items() if isinstance(value, int)}
    failed = any(result[key] for key in ("lost", "wrong", "failed_drives"))
    return Outcome(result, [flat_table("signals", shown)], failed=failed)
