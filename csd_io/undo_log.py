"""Undo log: a folder that saves the old content before every change, for repairs that may be wrong."""

from __future__ import annotations

import json
from typing import Any

from csd_io.folder import Bytes, DiskFile, DiskFolder

INDEX, OLD = "index.jsonl", "old.bin"


class UndoLogFile:
    """A file that saves old bytes to the undo log before they are overwritten."""

    def __init__(self, file: DiskFile, name: str, log: UndoLogFolder) -> None:
        self._file, self._name, self._log = file, name, log

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
        self._log.log_undo(self._name, offset, bytes(old))


class UndoLogFolder:
    """Folder with an undo log; every change is logged before it is made.

    `index.jsonl` has a line per change: file, offset (null: the whole file), and number of old bytes (null: the file
    did not exist). The old bytes follow each other in `old.bin`. Undoing the changes from last to first restores the
    folder.
    """

    def __init__(self, folder: DiskFolder, kept: DiskFolder) -> None:
        self._folder, self._kept, self.name = folder, kept, folder.name
        self._files: list[DiskFile] = []
        self._ends = [0, 0]

    def log_undo(self, name: str, offset: int | None, old: bytes | None) -> None:
        """Log the content that is about to be changed."""
        if not self._files:
            self._kept.path.mkdir(mode=0o700)
            self._files = [self._kept.open(each, 0) for each in (OLD, INDEX)]
        line: dict[str, Any] = {"file": name, "offset": offset, "bytes": None if old is None else len(old)}
        for number, data in enumerate((old or b"", json.dumps(line).encode() + b"\n")):
            self._files[number].write(self._ends[number], data)
            self._ends[number] += len(data)

    @property
    def changed(self) -> bool:
        """Whether anything was changed."""
        return bool(self._files)

    def sizes(self) -> dict[str, int]:
        return self._folder.sizes()

    def open(self, name: str, size: int) -> UndoLogFile:
        if name not in self.sizes():
            self.log_undo(name, None, None)
        return UndoLogFile(self._folder.open(name, size), name, self)

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
        self.log_undo(name, None, self._folder.read(name) if there else None)

    def resize(self, name: str, size: int) -> None:
        """Truncate a file, or extend it with zeros."""
        have = self.sizes().get(name)
        if have is None:
            self.open(name, size)
            return
        file = self._folder.open(name, size)
        tail = bytearray(max(0, have - size))
        file.read(min(have, size), memoryview(tail))
        self.log_undo(name, min(have, size), bytes(tail))
        file.resize(size)

    def free_bytes(self) -> int:
        return self._folder.free_bytes()

    def sync(self) -> None:
        self._kept.sync()
        self._folder.sync()
