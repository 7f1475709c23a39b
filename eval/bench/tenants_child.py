"""A hostile tenant in a process of its own: it keeps its window full of commands that hold up a drive or fill it.

A job comes as JSON, a line on standard input, after this process has said that it is there. From then on each byte `g`
lets it go on until a byte `p` has it wait; it says `paused` once the drive has answered everything. At the end of its
input it prints how many commands of each kind were carried out and refused, as JSON.
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
from csd_link.host_end import WindowDevice
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

HEADS, HEAD_DIM, ROW_BYTES = 8, 128, 4096  # of K and V of a token
FORKS = 2048  # sequences of one command
NAMES = 16384  # keys of one
APPENDS = 32  # of a full slot, before they are freed: the emulated flash is this machine's memory
REFUSED = 2000


class Hostile:
    """Who wants a drive for itself. counts: of commands, by kind and whether they were refused."""

    def __init__(self, device: WindowDevice) -> None:
        self.device = device
        self.counts: Counter[str] = Counter()
        self._asked: deque[tuple[Command, Future[Completion]]] = deque()

    def rounds(self) -> Iterator[None]:
        """Its worst, again and again; yields between two commands."""
        while True:
            for worst in (self._forks, self._creates, self._appends, self._names, self._refused):
                yield from worst()
                yield from self._all([SeqSweep()])

    def drain(self) -> list[Completion]:
        """Wait for all that was asked."""
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
        """Give commands to the drive as fast as it takes them."""
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
        """As many sequences as doubling makes."""
        mine = self._made(SeqCreate(1, 1, HEADS, HEAD_DIM, 4096))
        while mine:
            yield
            parents = mine[-FORKS:]
            made = self._made(SeqFork(parents, np.zeros(len(parents), np.int64)))
            mine = (*mine, *made) if made else ()
        yield from self._all([SeqCreate(FORKS, 1, HEADS, HEAD_DIM, 4096)] * 4)

    def _creates(self) -> Iterator[None]:
        """More than the drive has, much of what it has, and their ends."""
        yield from self._all([SeqCreate(1 << 16, 256, HEADS, HEAD_DIM, 4096)] * 16)
        for _ in range(4):
            mine = self._made(SeqCreate(FORKS // 8, 32, HEADS, HEAD_DIM, 4096))
            yield
            yield from self._all([KvFree(mine)] if mine else [])

    def _appends(self) -> Iterator[None]:
        """Full slots, both ways."""
        seqs = self._made(SeqCreate(1, 1, HEADS, HEAD_DIM, 1 << 20))
        tokens = self.device.identity.layout.slot_bytes // ROW_BYTES - 1
        rows = np.ones((tokens, HEADS, HEAD_DIM), np.float16)
        yield from self._all([KvAppend(seqs, 0, np.array([tokens]), rows, rows)] * APPENDS)
        yield from self._all([KvGather(seqs, np.array([0]), np.array([tokens]), 0, 1)] * APPENDS)
        yield from self._all([KvFree(seqs), SeqSweep(), Flush()])  # few sequences are left to record

    def _names(self) -> Iterator[None]:
        """Many keys of one sequence: given, looked up, listed, dropped."""
        seqs, row = self._made(SeqCreate(1, 1, 1, 16, 64)), np.ones((1, 1, 16), np.float16)
        keys = np.frombuffer(os.urandom(KEY.itemsize * NAMES), KEY)
        ones, first = np.ones(NAMES, np.int64), np.zeros(1, KEY)
        append = KvAppend(seqs, 0, np.array([1]), row, row)
        yield from self._all(
            [append, KvName(seqs, ones, keys), KvExist(keys), KvList(first, NAMES), KvDrop(keys), KvFree(seqs)]
        )

    def _refused(self) -> Iterator[None]:
        """The window full of what the drive refuses."""
        yield from self._all([KvFree((1,))] * REFUSED)


def main() -> None:
    """Carry the job out."""
    print("ready", flush=True)
    job = json.loads(sys.stdin.readline())
    if hasattr(os, "SCHED_IDLE"):  # what is measured is the drive, not who gets this machine's cores
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
