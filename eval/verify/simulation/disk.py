"""A simulated disk that can lose power, fill up, fail, or lose unsynced writes, driven by a seed."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Mapping

from csd_io.folder import Bytes, DiskFile, DiskFolder, Durability

SECTOR = 512  # bytes: written whole or not at all
ROOM = 1 << 40


class Killed(BaseException):
    """The writing process was killed."""


class SimDisk:
    """A folder of files in memory. Writes are visible at once; unsynced writes may be lost on power loss.

    Attributes:
        deaths: Counts down with each write; at 0 the process is killed during it.
        fault: errno of every write from now on, 0 for none.
        synced: Called on every sync.
    """

    def __init__(self, name: str, durability: Durability, draw: random.Random) -> None:
        self.name, self.durability, self._draw = name, durability, draw
        self.files: dict[str, bytearray] = {}
        self._durable: dict[str, bytearray] = {}
        self._pending: list[tuple[str, int, bytes]] = []
        self.deaths, self.fault = -1, 0
        self.synced: Callable[[], None] = lambda: None

    def sizes(self) -> dict[str, int]:
        return {name: len(content) for name, content in self.files.items()}

    def open(self, name: str, size: int) -> SimFile:
        for each in (self.files, self._durable):
            each.setdefault(name, bytearray(size))
        return SimFile(self, name)

    def read(self, name: str) -> bytes:
        return bytes(self.files[name])

    def put(self, name: str, data: bytes) -> None:
        self.files[name], self._durable[name] = bytearray(data), bytearray(data)

    def swap(self, contents: Mapping[str, bytes]) -> dict[str, bytes]:
        """Replace the contents of files, as copying them into the folder does; returns what they had."""
        before = {name: bytes(self.files[name]) for name in contents}
        for name, content in contents.items():
            self.put(name, content)
        return before

    def rename(self, name: str, to: str) -> None:
        for each in (self.files, self._durable):
            each[to] = each.pop(name)

    def remove(self, name: str) -> None:
        for each in (self.files, self._durable):
            each.pop(name, None)

    def free_bytes(self) -> int:
        return 0 if self.fault == errno.ENOSPC else ROOM

    def write(self, name: str, offset: int, data: bytes) -> None:
        """Write, or be killed during the write: then some leading sectors are complete, but never all."""
        if self.deaths == 0:
            whole = self._draw.randrange(max(1, len(data) // SECTOR)) * SECTOR
            data = data[: max(0, whole - offset % SECTOR)]
        if self.fault and self.deaths != 0:
            raise OSError(self.fault, os.strerror(self.fault), f"{self.name}/{name}")
        self._put(name, offset, data)
        self._pending.append((name, offset, bytes(data)))
        self.deaths -= 1
        if self.deaths == -1:
            raise Killed

    def _put(self, name: str, offset: int, data: bytes) -> None:
        self.files[name][offset : offset + len(data)] = data

    def sync(self) -> None:
        if self.durability == "host":
            self._settle(self._pending)
            self.synced()

    def _settle(self, writes: list[tuple[str, int, bytes]]) -> None:
        for name, offset, data in writes:
            self._durable[name][offset : offset + len(data)] = data
        self._pending = []

    def process_died(self) -> None:
        """The process exited; its completed writes remain."""
        self._settle(self._pending)
        self.deaths = -1

    def lose_power(self) -> tuple[int, int]:
        """Apply any part of the unsynced writes, in any order; returns the numbers of lost and torn writes."""
        lost, torn, kept = 0, 0, []
        for name, offset, data in self._pending:
            luck = self._draw.random()
            if luck < 0.4:
                lost += 1
            elif luck < 0.6 and len(data) > SECTOR:
                torn += 1
                first = self._draw.randrange(len(data) // SECTOR) * SECTOR
                kept.append((name, offset + first, data[first : first + SECTOR]))
            else:
                kept.append((name, offset, data))
        self._settle(kept)
        self.files = {name: bytearray(content) for name, content in self._durable.items()}
        self.deaths = -1
        return lost, torn

    def flip(self, name: str, bit: int) -> None:
        """Flip one bit."""
        for each in (self.files, self._durable):
            each[name][bit // 8] ^= 1 << bit % 8


class MirroredDisk(SimDisk):
    """A simulated disk whose files are mirrored in a real folder, for readers that need real files.

    Blocks of zeros become holes.
    """

    def __init__(self, folder: DiskFolder, durability: Durability, draw: random.Random) -> None:
        super().__init__(folder.name, durability, draw)
        self._folder, self._real = folder, dict[str, DiskFile]()

    def open(self, name: str, size: int) -> SimFile:
        if name not in self._real:
            self._real[name] = self._folder.open(name, size)
        return super().open(name, size)

    def _put(self, name: str, offset: int, data: bytes) -> None:
        super()._put(name, offset, data)
        if any(data):
            self._real[name].write(offset, data)
        elif data:
            self._real[name].discard(offset, len(data))

    def flip(self, name: str, bit: int) -> None:
        super().flip(name, bit)
        self._real[name].write(bit // 8, self.files[name][bit // 8 : bit // 8 + 1])

    def put(self, name: str, data: bytes) -> None:
        super().put(name, data)
        if name in self._real:
            self._real[name].discard(0, len(data))
            self._real[name].write(0, data)

    def lose_power(self) -> tuple[int, int]:
        gone = super().lose_power()
        for name, content in self.files.items():
            self.put(name, bytes(content))
        return gone

    def close(self) -> None:
        """Close the folder's files."""
        self._folder.close()


class SimFile:
    """A file of a simulated disk."""

    def __init__(self, disk: SimDisk, name: str) -> None:
        self._disk, self._name = disk, name

    def read(self, offset: int, into: memoryview) -> None:
        into[:] = self._disk.files[self._name][offset : offset + len(into)]

    def write(self, offset: int, data: Bytes) -> None:
        self._disk.write(self._name, offset, bytes(data))

    def discard(self, offset: int, size: int) -> None:
        self._disk.write(self._name, offset, bytes(size))

    def written(self) -> list[tuple[int, int]]:
        return [(0, len(self._disk.files[self._name]))]
