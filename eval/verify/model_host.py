"""An honest NVMe/TCP host with a dictionary of what it has stored: each answer is compared with it.

Blocks and values hold what was written last, until the drive restarts: then each is as its last flush left it, or as
any write after it. Sequences end with the drive's session.
"""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from csd_firmware.process.listen import BLOCKS_NSID, VALUES_NSID
from csd_link.nvmeof.commands import Code, Sqe
from csd_link.nvmeof.device import Endpoint, NvmeDrive
from csd_link.nvmeof.host import NvmeHost
from csd_link.nvmeof.host_queue import StatusError
from csd_link.nvmeof.key_value import KeyValue
from csd_link.nvmeof.nvm import LBA_BYTES, Nvm
from csd_spec import Command, Completion, DriveError, KvAppend, KvCrop, KvFree, KvRead, SeqCreate, Status

BLOCKS, KEYS, LARGEST = 64, 8, 32  # of a host; blocks of its largest command
HEADS, HEAD_DIM, TOKENS = 2, 16, 400
ABSENT = b""
Versions = list[bytes]  # contents that are allowed, oldest first; the last one while the drive has not restarted


@dataclass(slots=True)
class Counts:
    """What went wrong, and the wall-clock time of each act, ms.

    Attributes:
        lost: Commands without an answer.
        wrong: Answers that differ from what was stored.
        refused: Commands with another status than success.
    """

    lost: int = 0
    wrong: int = 0
    refused: int = 0
    took_ms: list[float] = field(default_factory=list)
    first: str = ""

    def note(self, what: str, why: str) -> None:
        """Count an error and keep the first reason."""
        setattr(self, what, getattr(self, what) + 1)
        self.first = self.first or f"{what}: {why}"


class ModelHost:
    """A host that uses blocks and keys of its own, and a sequence, all chosen by `draw`."""

    def __init__(self, locate: Callable[[], Endpoint], number: int, draw: random.Random) -> None:
        self._locate, self._number, self._draw, self.counts = locate, number, draw, Counts()
        self.name = f"nqn.2026-11.dev.vcsd:model-host-{number}"
        self._blocks: dict[int, Versions] = {number * BLOCKS + at: [bytes(LBA_BYTES)] for at in range(BLOCKS)}
        self._values: dict[bytes, Versions] = {bytes([number, at]): [ABSENT] for at in range(KEYS)}
        self._acts = (self.write, self.read, self.read, self.store, self.retrieve, self.append, self.rows, self.flush)
        self._doing: dict[int, bytes] = {}  # contents that a change under way brings, by the id of their versions
        self._undo = ExitStack()
        self.connect()

    def connect(self) -> None:
        """Connect, again after a connection was lost or the drive has restarted."""
        self.close()
        with ExitStack() as undo:
            place = self._locate()
            self._host = NvmeHost(place.host, place.port, place.nqn, self.name)
            undo.callback(self._host.close)
            self._device = NvmeDrive(self._locate, self.name)
            undo.callback(self._device.close)
            self._undo = undo.pop_all()
        self._seq, self._k = 0, np.zeros((0, HEADS, HEAD_DIM), np.float16)

    def close(self) -> None:
        """Disconnect."""
        self._undo.close()

    def restarted(self) -> None:
        """The drive has restarted: read what it holds, which must be allowed, and connect."""
        self.connect()
        for versions, read, what in self._all():
            self._settle(versions, read(), what)

    def _settle(self, versions: Versions, value: bytes, what: str) -> None:
        """Accept one of the allowed contents, which is from now on the only one that can come back."""
        if value not in versions:
            self.counts.note("wrong", f"{what} holds what it may not hold")
        versions[:] = [value]

    def act(self) -> None:
        """Do something, and compare; an interrupted change may have happened, or not."""
        began = time.perf_counter()
        try:
            self._draw.choice(self._acts)()
        except (StatusError, DriveError) as error:
            self._doing = {}
            self.counts.note("refused", str(error))
        except OSError as error:
            self.counts.note("lost", f"{type(error).__name__}: {error}")
            self.cut()
        self.counts.took_ms.append((time.perf_counter() - began) * 1e3)

    def cut(self) -> None:
        """Connect after a connection was cut: the change that was under way has happened, or not."""
        self.connect()
        doing, self._doing = self._doing, {}
        for versions, read, what in self._all():
            if (new := doing.get(id(versions))) is None:
                self._compare(versions, read(), what)
            elif (value := read()) in (versions[-1], new):
                versions += [new] if value == new else []
            else:
                self.counts.note("wrong", f"{what} is neither as before an interrupted change nor as after it")

    def check(self) -> None:
        """Read everything."""
        for versions, read, what in self._all():
            self._compare(versions, read(), what)

    def _all(self) -> Iterator[tuple[Versions, Callable[[], bytes], str]]:
        for lba, versions in self._blocks.items():
            yield versions, partial(self._read, lba, 1), f"block {lba}"
        for key, versions in self._values.items():
            yield versions, partial(self._retrieve, key), f"value {key!r}"

    def _compare(self, versions: Versions, value: bytes, what: str) -> None:
        if value != versions[-1]:
            self.counts.note("wrong", what)

    def _range(self) -> tuple[int, int]:
        count = self._draw.choice((1, 1, 2, 5, LARGEST))
        return self._number * BLOCKS + self._draw.randrange(BLOCKS - count + 1), count

    def write(self) -> None:
        """Write a range of blocks."""
        first, count = self._range()
        parts = [self._draw.randbytes(LBA_BYTES) for _ in range(count)]
        sqe = Sqe(Nvm.WRITE, nsid=BLOCKS_NSID, cdw10=first, cdw12=count - 1)
        self._change(sqe, parts, {first + at: part for at, part in enumerate(parts)}, self._blocks)

    def read(self) -> None:
        """Read a range of blocks."""
        first, count = self._range()
        wanted = b"".join(self._blocks[first + at][-1] for at in range(count))
        self._compare([wanted], self._read(first, count), f"blocks {first} to {first + count - 1}")

    def _read(self, first: int, count: int) -> bytes:
        sqe = Sqe(Nvm.READ, nsid=BLOCKS_NSID, cdw10=first, cdw12=count - 1)
        return bytes(self._host.io.command(sqe, (), count * LBA_BYTES).data)

    def store(self) -> None:
        """Store a value, or delete it."""
        key, value = self._draw.choice(list(self._values)), self._draw.randbytes(self._draw.choice((1, 4096, 50_000)))
        if self._draw.random() < 0.2:
            if self._values[key][-1] == ABSENT:
                return
            self._change(self._of_key(KeyValue.DELETE, key), (), {key: ABSENT}, self._values)
        else:
            self._change(self._of_key(KeyValue.STORE, key, len(value)), [value], {key: value}, self._values)

    def _change(self, sqe: Sqe, data: Sequence[bytes], new: Mapping[Any, bytes], model: dict[Any, Versions]) -> None:
        """Carry out a change, and remember what it is until it is acknowledged."""
        self._doing = {id(model[key]): content for key, content in new.items()}
        self._host.io.command(sqe, data)
        self._doing = {}
        for key, content in new.items():
            model[key].append(content)

    def retrieve(self) -> None:
        """Read a value."""
        key = self._draw.choice(list(self._values))
        self._compare(self._values[key], self._retrieve(key), f"value {key!r}")

    def _retrieve(self, key: bytes) -> bytes:
        try:
            reply = self._host.io.command(self._of_key(KeyValue.RETRIEVE, key, 1 << 16), (), 1 << 16)
        except StatusError as error:
            if error.status == Code.UNKNOWN_KEY:
                return ABSENT
            raise
        return bytes(reply.data)[: reply.result]

    @staticmethod
    def _of_key(opcode: int, key: bytes, size: int = 0) -> Sqe:
        (low,) = struct.unpack("<I", key.ljust(4, b"\0"))
        return Sqe(opcode, nsid=VALUES_NSID, cdw2=low, cdw10=size, cdw11=len(key))

    def append(self) -> None:
        """Append rows to the sequence; when it is long, free it or drop its end first."""
        if not self._seq:
            self._seq = int(self._done(SeqCreate(1, 1, HEADS, HEAD_DIM, 2 * TOKENS)).data[0][0])
        tokens = self._draw.randint(1, 40)
        if len(self._k) + tokens > TOKENS:
            if self._draw.random() < 0.5:
                self._done(KvFree((self._seq,)))
                self._seq, self._k = 0, self._k[:0]
                return
            self._k = self._k[: self._draw.randrange(TOKENS // 2)]
            self._done(KvCrop((self._seq,), 0, np.array([len(self._k)])))
        rows = np.frombuffer(self._draw.randbytes(tokens * HEADS * HEAD_DIM), np.uint8).astype(np.float16)
        rows = rows.reshape(tokens, HEADS, HEAD_DIM)
        self._done(KvAppend((self._seq,), 0, np.array([tokens]), rows, -rows))
        self._k = np.concatenate([self._k, rows])

    def rows(self) -> None:
        """Read all rows of the sequence."""
        if len(self._k):
            k, v = self._done(KvRead((self._seq,), 0)).data
            if not (np.array_equal(k, self._k) and np.array_equal(v, -self._k)):
                self.counts.note("wrong", "rows of the sequence")

    def _done(self, command: Command) -> Completion:
        done = self._device.submit(command, 0).result()
        if done.status is Status.PATH_LOST:
            raise ConnectionError(done.reason)
        if done.status is not Status.SUCCESS:
            raise DriveError(type(command).__name__, done.status, done.reason)
        return done

    def flush(self) -> None:
        """Flush: from now on nothing older can come back."""
        self._host.io.command(Sqe(Nvm.FLUSH, nsid=BLOCKS_NSID))
        for versions in (*self._blocks.values(), *self._values.values()):
            del versions[:-1]
