"""A folder whose every change keeps what was there before: for those who mend, and may be wrong."""

from __future__ import annotations

import json
from typing import Any

from csd_io.folder import Bytes, DiskFile, DiskFolder

INDEX, OLD = "index.jsonl", "old.bin"


class KeptFile:
    """A file; what is overwritten goes to the folder of kept bytes first."""

    def __init__(self, file: DiskFile, name: str, keeper: KeepingFolder) -> None:
        self._file, self._name, self._keeper = file, name, keeper

    def read(self, offset: int, into: memoryview) -> None:
        self._file.read(offset, into)

    def write(self, offset: int, data: Bytes) -> None:
        self._keep(offset, len(data))
        self._file.write(offset, data)

    def discard(self, offset: int, size: int) -> None:
        self._keep(offset, size)
        self._file.discard(offset, size)

    def written(self) -> list[tuple[int, int]]:
        return self._file.written()

    def _keep(self, offset: int, size: int) -> None:
        old = bytearray(size)
        self._file.read(offset, memoryview(old))
        self._keeper.keep(self._name, offset, bytes(old))


class KeepingFolder:
    """Every change is written down before it is made, in the order in which they are made.

    `index.jsonl` has a line for each: the file, the offset (null: the whole file), the number of bytes that were there
    (null: there was no file). The bytes themselves follow each other in `old.bin`. Undone from last to first, a folder
    is as it was.
    """

    def __init__(self, folder: DiskFolder, kept: DiskFolder) -> None:
        self._folder, self._kept, self.name = folder, kept, folder.name
        self._files: list[DiskFile] = []
        self._ends = [0, 0]

    def keep(self, name: str, offset: int | None, old: bytes | None) -> None:
        """Write down what is about to go."""
        if not self._files:
            self._kept.path.mkdir(mode=0o700)
            self._files = [self._kept.open(each, 0) for each in (OLD, INDEX)]
        line: dict[str, Any] = {"file": name, "offset": offset, "bytes": None if old is None else len(old)}
        for number, data in enumerate((old or b"", json.dumps(line).encode() + b"\n")):
            self._files[number].write(self._ends[number], data)
            self._ends[number] += len(data)

    @property
    def changed(self) -> bool:
        """Whether anything was."""
        return bool(self._files)

    def sizes(self) -> dict[str, int]:
        return self._folder.sizes()

    def open(self, name: str, size: int) -> KeptFile:
        if name not in self.sizes():
            self.keep(name, None, None)
        return KeptFile(self._folder.open(name, size), name, self)

    def read(self, name: str) -> bytes:
        return self._folder.read(name)

    def put(self, name: str, data: bytes) -> None:
        self._keep_whole(name)
        self._folder.put(name, data)

    def rename(self, name: str, to: str) -> None:
        self._keep_whole(to)
        self._keep_whole(name)
        self._folder.rename(name, to)

    def remove(self, name: str) -> None:
        self._keep_whole(name)
        self._folder.remove(name)

    def _keep_whole(self, name: str) -> None:
        there = name in self.sizes()
        self.keep(name, None, self._folder.read(name) if there else None)

    def resize(self, name: str, size: int) -> None:
        """Cut a file, or let it end in zeros."""
        have = self.sizes().get(name)
        if have is None:
            self.open(name, size)
            return
        file = self._folder.open(name, size)
        tail = bytearray(max(0, have - size))
        file.read(min(have, size), memoryview(tail))
        self.keep(name, min(have, size), bytes(tail))
        file.resize(size)

    def free_bytes(self) -> int:
        return self._folder.free_bytes()

    def sync(self) -> None:
        self._kept.sync()
        self._folder.sync()
