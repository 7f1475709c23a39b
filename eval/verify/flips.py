"""Flip single bits and runs of bits in a drive's files; then open the drive and compare every byte."""

from __future__ import annotations

import tempfile
from collections import Counter
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from csd_firmware import InProcessDrive
from csd_firmware.folder import DriveFolder, secret_of
from csd_firmware.logs import smart
from ftl import Ftl, Nand, UncorrectableReadError
from vcsd.progress import Tick, no_tick
from vcsd_eval import sweep
from vcsd_eval.verify.random_host import DRIVE, RandomHost, is_stored

FLIPS_A_DRIVE = 250
VERBS = 80  # before the flush whose state is compared
KINDS = {"bit": 0.8, "burst": 0.15, "page": 0.05}  # one bit, up to 64 bits in a row, a page of garbage


@dataclass(frozen=True, slots=True)
class FlushedFolder:
    """A drive's folder after a flush, and its expected contents."""

    folder: Path
    host: RandomHost
    files: dict[str, bytes]
    secret: bytes

    @classmethod
    def make(cls, folder: Path, seed: int) -> FlushedFolder:
        """Random verbs on a drive in files, the last of them a flush."""
        held = DriveFolder(DRIVE, folder)
        host = RandomHost(seed, Nand(DRIVE.geometry, folder=held.files))
        secret = secret_of(folder)
        for _ in range(VERBS):
            host.step()
        host.ftl.flush(0)
        held.close()
        return cls(folder, host, {file.name: file.read_bytes() for file in folder.iterdir()}, secret)

    def restore(self) -> None:
        """Restore the folder to its state after the flush."""
        for file in self.folder.iterdir():
            if file.name not in self.files:
                file.unlink()
        for name, content in self.files.items():
            if (self.folder / name).read_bytes() != content:
                (self.folder / name).write_bytes(content)


class Flipper:
    """Damages one position of a folder at a time. Every file gets the same share, and every part of it is covered."""

    def __init__(self, folder: FlushedFolder, seed: int) -> None:
        self._kept, self._draw = folder, np.random.default_rng(seed)
        self._names = sorted(name for name, content in folder.files.items() if content)
        self._turn = Counter[str]()

    def flip(self, number: int) -> str:
        """Damage the folder; returns how."""
        name = self._names[number % len(self._names)]
        content = bytearray(self._kept.files[name])
        turn, regions = self._turn[name], min(1024, len(content))
        self._turn[name] += 1
        width = len(content) / regions
        at = int(turn % regions * width + self._draw.random() * width)
        kind = str(self._draw.choice(list(KINDS), p=list(KINDS.values())))
        if kind == "page":
            size = DRIVE.geometry.page_bytes
            at = at // size * size
            part = content[at : at + size]
            content[at : at + size] = self._draw.integers(0, 256, len(part), dtype=np.uint8).tobytes()
        else:
            first = 8 * at + int(self._draw.integers(8))
            count = 1 if kind == "bit" else int(self._draw.integers(2, 65))
            which = [first, *(first + np.flatnonzero(self._draw.random(count - 1) < 0.5) + 1).tolist()]
            for bit in (bit for bit in which if bit < 8 * len(content)):
                content[bit // 8] ^= 1 << bit % 8
        (self._kept.folder / name).write_bytes(content)
        return kind


def judge(folder: FlushedFolder) -> str:
    """Open the damaged drive and compare: `harmless`, `corrected`, `reported` or `silent`."""
    try:
        secret = secret_of(folder.folder)
        device = InProcessDrive.reopen(folder.folder)
    except ValueError:
        return "reported"
    try:
        ftl = device.firmware.ftl
        wrong, missed = _compare(ftl, folder.host)
        wrong += secret != folder.secret
        noticed = bool(smart(ftl)["critical_warning"]) and bool(device.firmware.state.history.errors)
        if wrong or (missed and not noticed):
            return "silent"
        if missed or noticed:
            return "reported"
        touched = ftl.nand.damage.corrected or ftl.nand.damage.pages or _differs(folder)
        return "corrected" if touched else "harmless"
    finally:
        device.close()


def _differs(folder: FlushedFolder) -> bool:
    names = ("secret.bin", "drive.json")
    return any((folder.folder / name).read_bytes() != folder.files[name] for name in names)


def _compare(ftl: Ftl, host: RandomHost) -> tuple[int, int]:
    """Count wrong sequences and logical pages that are not reported, and those that are reported or missing."""
    wrong = len(set(ftl.sequences) - set(host.model))
    missed = len(set(host.model) - set(ftl.sequences))
    for handle in set(host.model) & set(ftl.sequences):
        if ftl.sequences[handle].failed:
            missed += 1
            continue
        stored = host.model[handle]
        wrong += stored.value is not None and not is_stored(ftl, handle, stored)
        for layer, (kept_k, kept_v) in enumerate(stored.layers):
            k, v, _ = ftl.read_back(handle, layer)
            wrong += not (np.array_equal(k, kept_k) and np.array_equal(v, kept_v))
    for lpn in range(min(host.blocks.shape[0], ftl.blocks.pages)):
        try:
            wrong += not np.array_equal(ftl.blocks.read(np.array([lpn]), 0)[0][0], host.blocks[lpn])
        except UncorrectableReadError:
            missed += 1
    return wrong, missed + (ftl.blocks.pages != host.blocks.shape[0])


def damage_drive(seed: int, turns: range) -> Counter[str]:
    """Damage one drive once for each turn; counts outcomes, and outcomes by kind."""
    counts = Counter[str]()
    with tempfile.TemporaryDirectory(prefix="vcsd-flips-") as scratch:
        folder = FlushedFolder.make(Path(scratch) / "drive", seed)
        flipper = Flipper(folder, seed)
        for turn in turns:
            kind = flipper.flip(turn)
            outcome = judge(folder)
            counts.update((outcome, f"{outcome}_{kind}"))
            folder.restore()
    return counts


def bench_flips(flips: int, seed: int, workers: int = 2, tick: Tick = no_tick) -> dict[str, Any]:
    """Flip bits, bursts and pages, one position at a time, on drives of several seeds.

    Returns:
        corrected: All data intact although a relevant bit was wrong. reported: Lost data is refused, and the drive's
            health log reports it. silent: Data was stale, wrong or missing without a report.
    """
    counts, drives = Counter[str](), -(-flips // FLIPS_A_DRIVE)
    parts = [range(flips * number // drives, flips * (number + 1) // drives) for number in range(drives)]
    with sweep.workers(workers) as pool:
        under_way = [pool.submit(damage_drive, seed + number, part) for number, part in enumerate(parts)]
        for done in as_completed(under_way):
            counts.update(done.result())
            for _ in range(FLIPS_A_DRIVE):
                tick(None)
    outcomes = ("reported", "corrected", "harmless", "silent")
    by_kind = {kind: {outcome: counts[f"{outcome}_{kind}"] for outcome in outcomes} for kind in KINDS}
    return {"flips": flips} | {outcome: counts[outcome] for outcome in outcomes} | {"by_kind": by_kind, "seed": seed}
