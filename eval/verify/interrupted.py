"""A drive for each interrupted verb, all prepared alike, and the verbs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from csd_firmware import Firmware
from csd_firmware.namespace import Namespace
from csd_io.folder import DiskFolder
from csd_io.medium import Kind, Medium
from csd_spec import (
    Attend,
    Command,
    Completion,
    Flush,
    GetLog,
    KvAppend,
    KvCrop,
    KvDrop,
    KvExist,
    KvFree,
    KvGather,
    KvList,
    KvName,
    KvRead,
    LogPage,
    SeqCreate,
    SeqFork,
    SeqSweep,
    Status,
)
from csd_spec.arrays import F16, keys_of
from csd_spec.layouts import layout_named
from ftl import Nand
from ftl.flash.files import NandFiles
from vcsd_eval.verify.random_host import DIM, DRIVE, HEADS
from vcsd_eval.verify.tested_storage import CACHE_BYTES

LAYERS, SEQUENCES, GROUP, PAGES = 1, 3, 2, 16
KEYS = [bytes([number]) * 16 for number in range(1, 5)]

Rows = tuple[bytes, ...]
Seqs = dict[int, tuple[Rows, frozenset[tuple[bytes, int]]]]  # handle -> (key and value rows of each layer, names)


@dataclass(frozen=True, slots=True)
class Observed:
    """Contents of a drive."""

    seqs: Seqs
    pages: tuple[bytes, ...]


@dataclass(slots=True)
class PowerCycle:
    """A drive from one power-on to the next, and the handles of the sequences that it was prepared with."""

    folder: DiskFolder
    firmware: Firmware
    namespace: Namespace
    seqs: tuple[int, ...] = ()
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))
    layout: str = "fp16"
    latent: bool = False

    def rows(self, *shape: int) -> F16:
        return self.generator.standard_normal((*shape, DIM)).astype(np.float16)

    def values(self, *shape: int) -> F16:
        """V, which layouts with V as a part of K have no channels of."""
        return np.zeros((*shape, 0), np.float16) if self.latent else self.rows(*shape)

    def do(self, command: Command) -> Completion:
        return self.firmware.step(command, 0)

    def append(self, seqs: tuple[int, ...], layer: int, tokens: int) -> KvAppend:
        lengths = np.full(len(seqs), tokens)
        rows = tokens * len(seqs), HEADS
        return KvAppend(seqs, layer, lengths, self.rows(*rows), self.values(*rows))

    def attend(self, method: str, seqs: tuple[int, ...]) -> Attend:
        few, one = (len(seqs), HEADS), np.ones(len(seqs), np.int64)
        q, k, v = self.rows(*few, GROUP), self.rows(*few), self.values(*few)
        return Attend(seqs, 0, q, k, v, method, 4, 8 * one, one)

    def close(self) -> None:
        self.firmware.ftl.nand.page_store.close()
        self.folder.close()


def _write_pages(life: PowerCycle) -> None:
    life.namespace.write(2 * life.namespace.page_bytes, life.generator.bytes(3 * life.namespace.page_bytes + 100))


def _write_many_pages(life: PowerCycle) -> None:
    """Enough of them are programmed at once."""
    life.namespace.write(0, life.generator.bytes(PAGES * life.namespace.page_bytes))


def _flush_blocks(life: PowerCycle) -> None:
    life.namespace.flush()


def _discard_pages(life: PowerCycle) -> None:
    life.namespace.discard(life.namespace.page_bytes, 4 * life.namespace.page_bytes)


CASES: dict[str, Callable[[PowerCycle], Completion | None]] = {
    "create": lambda life: life.do(SeqCreate(2, LAYERS, HEADS, DIM, 128, layout_named(life.layout).code)),
    "append": lambda life: life.do(life.append(life.seqs[:2], 0, 3)),
    "append long": lambda life: life.do(life.append(life.seqs[:2], 0, 70)),
    "attend": lambda life: life.do(life.attend("dense", life.seqs[1:2])),
    "attend with sparf": lambda life: life.do(life.attend("sparf", life.seqs[:2])),
    "read": lambda life: life.do(KvRead(life.seqs, 0)),
    "gather": lambda life: life.do(
        KvGather(life.seqs[:2], np.array([2, 20]), np.array([11, 9]), layer=0, layers=LAYERS)
    ),
    "crop": lambda life: life.do(KvCrop(life.seqs[:2], 0, np.array([20, 33]))),
    "free": lambda life: life.do(KvFree(life.seqs[1:])),
    "fork": lambda life: life.do(SeqFork(life.seqs[:2], np.array([25, 99]))),
    "name": lambda life: life.do(KvName(life.seqs[1:2], np.array([9, 12]), keys_of(KEYS[:2]))),
    "exist": lambda life: life.do(KvExist(keys_of(KEYS[:2]))),
    "drop": lambda life: life.do(KvDrop(keys_of(KEYS[:3]))),
    "list": lambda life: life.do(KvList(keys_of([bytes(16)]), 4)),
    "sweep": lambda life: life.do(SeqSweep()),
    "log": lambda life: life.do(GetLog(LogPage.SMART)),
    "flush": lambda life: life.do(Flush()),
    "block write": _write_pages,
    "large block write": _write_many_pages,
    "block discard": _discard_pages,
    "block flush": _flush_blocks,
    "format": lambda life: life.firmware.format() and None,
}


class InterruptedDrives:
    """Drives of one layout on one medium, all prepared alike; the files of the flushed drive are written again for
    each."""

    def __init__(self, layout: str, medium: Kind, path: Path) -> None:
        self._layout, self._medium, self._path = layout, Medium(medium, CACHE_BYTES), path
        self._latent = layout_named(layout).latent
        self._path.mkdir(mode=0o700)
        folder = DiskFolder(self._path)
        NandFiles.make(folder, DRIVE.geometry)
        folder.close()
        life = self._open()
        self._fill(life)
        life.close()
        self._image = {path.name: path.read_bytes() for path in self._path.iterdir()}

    def _open(self) -> PowerCycle:
        folder = DiskFolder(self._path)
        firmware = Firmware(DRIVE, Nand(DRIVE.geometry, folder=folder, medium=self._medium))
        seqs = tuple(sorted(firmware.ftl.sequences))
        lock: Any = threading.RLock()  # an exception where a `with` block ends may leave it locked
        return PowerCycle(folder, firmware, Namespace(firmware, lock), seqs, layout=self._layout, latent=self._latent)

    def _fill(self, life: PowerCycle) -> None:
        """Sequences of some tokens, names, logical pages, garbage that can be erased; flushed."""
        created = life.do(SeqCreate(SEQUENCES + 1, LAYERS, HEADS, DIM, 128, layout_named(self._layout).code))
        assert created.status is Status.SUCCESS, created.reason
        life.seqs = tuple(created.data[0].tolist())
        for layer in range(LAYERS):
            for seqs, tokens in ((life.seqs[:SEQUENCES], 40), (life.seqs[SEQUENCES:], 90)):
                assert life.do(life.append(seqs, layer, tokens)).status is Status.SUCCESS
        life.do(KvName(life.seqs[:1], np.array([10, 30]), keys_of(KEYS[1:3])))
        life.namespace.write(0, life.generator.bytes(8 * life.namespace.page_bytes))
        life.namespace.flush()
        assert life.do(Flush()).status is Status.SUCCESS
        assert life.do(KvFree(life.seqs[SEQUENCES:])).status is Status.SUCCESS
        assert life.do(Flush()).status is Status.SUCCESS

    def life(self) -> PowerCycle:
        """The prepared drive: flushed sequences and pages, and some rows and pages after the flush."""
        for name, content in self._image.items():
            with (self._path / name).open("r+b") as file:
                file.write(content)
        life = self._open()
        life.do(life.append(life.seqs[:2], 0, 4))
        life.namespace.write(3 * life.namespace.page_bytes, life.generator.bytes(2 * life.namespace.page_bytes))
        for _ in range(2):
            life.do(life.attend("dense", life.seqs[1:2]))
        return life

    def power_on(self, life: PowerCycle) -> Observed:
        """Contents of the drive after a loss of power."""
        life.close()
        again = self._open()
        try:
            return observe(again)
        finally:
            again.close()


def observe(life: PowerCycle) -> Observed:
    """Everything that a drive holds, read through the FTL; raises FtlError for unreadable data."""
    ftl = life.firmware.ftl
    seqs: Seqs = {}
    for handle, seq in ftl.sequences.items():
        rows = [array.tobytes() for layer in range(seq.layers) for array in ftl.read_back(handle, layer)[:2]]
        seqs[handle] = tuple(rows), frozenset(seq.names.items())
    page = life.namespace.page_bytes
    content, _ = life.namespace.read(0, PAGES * page)
    return Observed(seqs, tuple(content[at : at + page] for at in range(0, PAGES * page, page)))
