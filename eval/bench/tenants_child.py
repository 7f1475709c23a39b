"""A hostile tenant in a separate process: it fills its submission window with commands that stall or fill the drive.

A job arrives as JSON, a line on standard input, after this process has reported that it is ready. Then a byte `g`
resumes the tenant and a byte `p` pauses it; it prints `paused` once the drive has completed all commands. At the end of
its input it prints, as JSON, how many commands of each kind were executed and refused.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from csd_link.connect import connect
from csd_link.host_end import WindowDrive
from csd_spec import (
    Command,
    Completion,
    Flush,
    KvAppend,
    KvDrop,
    KvExist,
    KvFree,
    KvGather,
    KvList,
    KvName,
    SeqCreate,
    SeqFork,
    SeqSweep,
    Status,
)
from csd_spec.arrays import KEY

HEADS, HEAD_DIM, ROW_BYTES = 8, 128, 4096  # of a token's keys and values
FORKS = 2048  # sequences per command
NAMES = 16384  # keys of one sequence
APPENDS = 32  # per full slot before they are freed: the emulated flash is host memory
REFUSED = 2000


class Hostile:
    """A tenant that tries to monopolize a drive. counts: commands by kind and by whether they were refused."""

    def __init__(self, device: WindowDrive) -> None:
        self.device = device
        self.counts: Counter[str] = Counter()
        self._asked: deque[tuple[Command, Future[Completion]]] = deque()

    def rounds(self) -> Iterator[None]:
        """Run the hostile command patterns repeatedly; yields between two commands."""
        while True:
            for worst in (self._forks, self._creates, self._appends, self._names, self._refused):
                yield from worst()
                yield from self._all([SeqSweep()])

    def drain(self) -> list[Completion]:
        """Wait for all submitted commands."""
        done = []
        while self._asked:
            command, future = self._asked.popleft()
            done.append(future.result())
            if done[-1].status is Status.PATH_LOST:
                raise OSError(done[-1].reason)
            refused = "_refused" if done[-1].status is not Status.SUCCESS else ""
            self.counts[f"{type(command).__name__}{refused}"] += 1
        return done

    def _all(self, commands: list[Any]) -> Iterator[None]:
        """Submit commands as fast as the drive accepts them."""
        for command in commands:
            if len(self._asked) >= self.device.identity.layout.depth:
                self.drain()
            self._asked.append((command, self.device.submit(command, 0)))
            yield

    def _done(self, command: Command) -> Completion:
        self.drain()
        self._asked.append((command, self.device.submit(command, 0)))
        return self.drain()[0]

    def _made(self, command: Command) -> tuple[int, ...]:
        done = self._done(command)
        return tuple(done.data[0].tolist()) if done.status is Status.SUCCESS else ()

    def _forks(self) -> Iterator[None]:
        """Fork sequences, doubling their number each time, until the drive refuses; then create more."""
        mine = self._made(SeqCreate(1, 1, HEADS, HEAD_DIM, 4096))
        while mine:
            yield
            parents = mine[-FORKS:]
            made = self._made(SeqFork(parents, np.zeros(len(parents), np.int64)))
            mine = (*mine, *made) if made else ()
        yield from self._all([SeqCreate(FORKS, 1, HEADS, HEAD_DIM, 4096)] * 4)

    def _creates(self) -> Iterator[None]:
        """Create more sequences than the drive allows, then many allowed ones, and free them."""
        yield from self._all([SeqCreate(1 << 16, 256, HEADS, HEAD_DIM, 4096)] * 16)
        for _ in range(4):
            mine = self._made(SeqCreate(FORKS // 8, 32, HEADS, HEAD_DIM, 4096))
            yield
            yield from self._all([KvFree(mine)] if mine else [])

    def _appends(self) -> Iterator[None]:
        """Fill slots in both directions: appends to the drive, gathers to the host."""
        seqs = self._made(SeqCreate(1, 1, HEADS, HEAD_DIM, 1 << 20))
        tokens = self.device.identity.layout.slot_bytes // ROW_BYTES - 1
        rows = np.ones((tokens, HEADS, HEAD_DIM), np.float16)
        yield from self._all([KvAppend(seqs, 0, np.array([tokens]), rows, rows)] * APPENDS)
        yield from self._all([KvGather(seqs, np.array([0]), np.array([tokens]), 0, 1)] * APPENDS)
        yield from self._all([KvFree(seqs), SeqSweep(), Flush()])  # few sequences remain to be journaled

    def _names(self) -> Iterator[None]:
        """Store, look up, list and delete many keys of one sequence."""
        seqs, row = self._made(SeqCreate(1, 1, 1, 16, 64)), np.ones((1, 1, 16), np.float16)
        keys = np.frombuffer(os.urandom(KEY.itemsize * NAMES), KEY)
        ones, first = np.ones(NAMES, np.int64), np.zeros(1, KEY)
        append = KvAppend(seqs, 0, np.array([1]), row, row)
        yield from self._all(
            [append, KvName(seqs, ones, keys), KvExist(keys), KvList(first, NAMES), KvDrop(keys), KvFree(seqs)]
        )

    def _refused(self) -> Iterator[None]:
        """Fill the window with commands that the drive refuses."""
        yield from self._all([KvFree((1,))] * REFUSED)


def main() -> None:
    """Run the job."""
    print("ready", flush=True)
    job = json.loads(sys.stdin.readline())
    if hasattr(os, "SCHED_IDLE"):  # measures the drive's arbitration, not the host's CPU scheduling
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    hostile = Hostile(connect(Path(job["window"])))
    waits = True
    for _ in hostile.rounds():
        while waits or select.select([0], [], [], 0)[0]:
            if waits:
                hostile.drain()
                print("paused", flush=True)
            said = os.read(0, 1)
            if not said:
                hostile.drain()
                print(json.dumps(hostile.counts), flush=True)
                return
            waits = said == b"p"


if __name__ == "__main__":
    main()
