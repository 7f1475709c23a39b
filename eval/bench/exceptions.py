"""Exceptions in the middle of verbs: one at each line and at each call that may allocate, then power-on."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Annotated, Any, Literal

import numpy as np
import typer

import csd_spec
from csd_firmware import Firmware
from csd_firmware.namespace import Namespace
from csd_io.folder import DiskFolder
from csd_io.medium import KINDS, Kind, Medium
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
from eval.bench.place import CACHE_BYTES
from eval.bench.random_host import DIM, DRIVE, HEADS
from eval.experiment import Outcome
from eval.sweep import sweep
from ftl import LAYOUTS, FtlError, Nand
from ftl.flash.files import NandFiles
from vcsd.options import MAX_SEED
from vcsd.progress import Tick, no_tick, progress
from vcsd.tables import flat_table

ROOT = Path(csd_spec.__file__).parents[1]
PACKAGES = tuple(f"{ROOT / name}{os.sep}" for name in ("csd_firmware", "ftl", "attention_engine", "csd_io", "csd_spec"))
LAYERS, SEQUENCES, GROUP, PAGES = 1, 3, 2, 16
KEYS = [bytes([number]) * 16 for number in range(1, 5)]

Event = Literal["line", "allocation"]
Rows = tuple[bytes, ...]
Seqs = dict[int, tuple[Rows, frozenset[tuple[bytes, int]]]]  # by handle: K and V of each layer, names


class Injected(Exception):
    """The exception that is raised at a line."""


class InjectedInterrupt(BaseException):
    """The same, as one that is not an Exception: what a signal's handler may raise."""


class Injector:
    """Counts events of the product's code inside a `with` block, and raises an exception at one of them.

    Attributes:
        seen: The source line of each event so far.
    """

    def __init__(self, event: Event, at: int | None = None) -> None:
        """Args:
        event: `line`: before each line; `allocation`: at each call of a C function, which may allocate memory.
        at: Number of the event that raises; None only counts.
        """
        self._event, self._at = event, at
        self.seen: list[tuple[str, int]] = []
        self._ours: dict[CodeType, bool] = {}

    def __enter__(self) -> Injector:
        if self._event == "line":
            sys.settrace(self._trace)
        else:
            sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        sys.setprofile(None)

    def _is_ours(self, code: CodeType) -> bool:
        known = self._ours.get(code)
        if known is None:
            known = self._ours[code] = code.co_filename.startswith(PACKAGES)
        return known

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if self._is_ours(frame.f_code) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self._count(frame)
        return self._line

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call" and self._is_ours(frame.f_code):
            self._count(frame)

    def _count(self, frame: FrameType) -> None:
        self.seen.append((frame.f_code.co_filename, frame.f_lineno))
        if len(self.seen) - 1 != self._at:
            return
        sys.settrace(None)
        sys.setprofile(None)
        if self._event == "allocation":
            raise MemoryError("injected")
        raise InjectedInterrupt if self._at % 3 == 0 else Injected


@dataclass(frozen=True, slots=True)
class Observed:
    """What a drive holds."""

    seqs: Seqs
    pages: tuple[bytes, ...]


@dataclass(slots=True)
class Life:
    """A drive from one power-on to the next, and the handles of the sequences that it was prepared with."""

    folder: DiskFolder
    firmware: Firmware
    namespace: Namespace
    seqs: tuple[int, ...] = ()
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))
    layout: int = 16
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
        self.firmware.ftl.nand.held.close()
        self.folder.close()


def _write_pages(life: Life) -> None:
    life.namespace.write(2 * life.namespace.page_bytes, life.generator.bytes(3 * life.namespace.page_bytes + 100))


def _write_many_pages(life: Life) -> None:
    """Enough of them are programmed at once."""
    life.namespace.write(0, life.generator.bytes(PAGES * life.namespace.page_bytes))


def _discard_pages(life: Life) -> None:
    life.namespace.discard(life.namespace.page_bytes, 4 * life.namespace.page_bytes)


CASES: dict[str, Callable[[Life], Completion | None]] = {
    "create": lambda life: life.do(SeqCreate(2, LAYERS, HEADS, DIM, 128, life.layout)),
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
    "block flush": lambda life: life.namespace.flush(),
    "format": lambda life: life.firmware.format() and None,
}


class Bench:
    """Drives of one layout on one medium, all prepared alike; the files of the flushed drive are written again for
    each."""

    def __init__(self, number: int, medium: Kind, path: Path) -> None:
        self._number, self._medium, self._path = number, Medium(medium, CACHE_BYTES), path
        self._latent = LAYOUTS[number].form(DRIVE.geometry.page_bytes, DIM, 128).latent
        self._path.mkdir(mode=0o700)
        folder = DiskFolder(self._path)
        NandFiles.make(folder, DRIVE.geometry)
        folder.close()
        life = self._open()
        self._fill(life)
        life.close()
        self._image = {path.name: path.read_bytes() for path in self._path.iterdir()}

    def _open(self) -> Life:
        folder = DiskFolder(self._path)
        firmware = Firmware(DRIVE, Nand(DRIVE.geometry, folder=folder, medium=self._medium))
        seqs = tuple(sorted(firmware.ftl.sequences))
        lock: Any = threading.RLock()  # an exception where a `with` block ends may leave it locked
        return Life(folder, firmware, Namespace(firmware, lock), seqs, layout=self._number, latent=self._latent)

    def _fill(self, life: Life) -> None:
        """Sequences of some tokens, names, logical pages, garbage that can be erased; flushed."""
        made = life.do(SeqCreate(SEQUENCES + 1, LAYERS, HEADS, DIM, 128, self._number))
        assert made.status is Status.SUCCESS, made.reason
        life.seqs = tuple(made.data[0].tolist())
        for layer in range(LAYERS):
            for seqs, tokens in ((life.seqs[:SEQUENCES], 40), (life.seqs[SEQUENCES:], 90)):
                assert life.do(life.append(seqs, layer, tokens)).status is Status.SUCCESS
        life.do(KvName(life.seqs[:1], np.array([10, 30]), keys_of(KEYS[1:3])))
        life.namespace.write(0, life.generator.bytes(8 * life.namespace.page_bytes))
        life.namespace.flush()
        assert life.do(Flush()).status is Status.SUCCESS
        assert life.do(KvFree(life.seqs[SEQUENCES:])).status is Status.SUCCESS
        assert life.do(Flush()).status is Status.SUCCESS

    def life(self) -> Life:
        """The drive, prepared: what was flushed, and rows and pages that were not."""
        for name, content in self._image.items():
            with (self._path / name).open("r+b") as file:
                file.write(content)
        life = self._open()
        life.do(life.append(life.seqs[:2], 0, 4))
        life.namespace.write(3 * life.namespace.page_bytes, life.generator.bytes(2 * life.namespace.page_bytes))
        for _ in range(2):
            life.do(life.attend("dense", life.seqs[1:2]))
        return life

    def power_on(self, life: Life) -> Observed:
        """What the drive holds after a loss of power."""
        life.close()
        again = self._open()
        try:
            return observe(again)
        finally:
            again.close()


def observe(life: Life) -> Observed:
    """Everything that a drive holds, read through the FTL; raises FtlError for what cannot be read."""
    ftl = life.firmware.ftl
    seqs: Seqs = {}
    for handle, seq in ftl.sequences.items():
        rows = [each.tobytes() for layer in range(seq.layers) for each in ftl.read_back(handle, layer)[:2]]
        seqs[handle] = tuple(rows), frozenset(seq.names.items())
    page = life.namespace.page_bytes
    content = life.namespace.read(0, PAGES * page)
    return Observed(seqs, tuple(content[at : at + page] for at in range(0, PAGES * page, page)))


@dataclass(frozen=True, slots=True)
class Expected:
    """What a drive may hold after a verb that was interrupted: each sequence and logical page is as its last flush left
    it, or as before the verb, or as after it, or as a flush after it leaves it.

    Attributes:
        undone: After a refused decode step. It takes its token back; a group that the token completed stays as its
            layout stores it, which may be rounded.
    """

    flushed: Observed
    before: Observed
    after: Observed
    settled: Observed
    undone: Observed

    @classmethod
    def of(cls, bench: Bench, name: str) -> Expected:
        """What the verb does when nothing interrupts it."""
        life = bench.life()
        lengths = np.array([life.firmware.ftl.sequences[handle].lengths[0] for handle in life.seqs])
        before, flushed = observe(life), bench.power_on(life)
        life = bench.life()
        CASES[name](life)
        after = observe(life)
        life.do(Flush())
        settled, undone = bench.power_on(life), before
        if name.startswith("attend"):
            life = bench.life()
            CASES[name](life)
            life.do(KvCrop(life.seqs, 0, lengths))
            undone = observe(life)
            life.close()
        return cls(flushed, before, after, settled, undone)

    def judge(self, found: Observed) -> tuple[int, int]:
        """Count flushed sequences that are lost, and sequences, names and logical pages that are wrong."""
        states = self.flushed, self.before, self.after, self.settled
        lost = len((self.flushed.seqs.keys() & self.after.seqs.keys()) - found.seqs.keys())
        wrong = sum(page not in allowed for page, *allowed in zip(found.pages, *(s.pages for s in states), strict=True))
        for handle, (rows, names) in found.seqs.items():
            known = [state.seqs[handle] for state in states if handle in state.seqs]
            right = rows in [each for each, _ in known] and names <= frozenset().union(*(each for _, each in known))
            wrong += not right
        return lost, wrong


def judge(bench: Bench, name: str, expected: Expected, injector: Injector) -> tuple[str, int, int]:
    """Interrupt a verb, look at the drive, and power it on.

    Returns:
        What became of the verb (`failed`: the drive failed; `refused`; `completed`; `raised`: before or after all that
        it changes), sequences lost, and sequences, pages and answers that are wrong.
    """
    life, outcome = bench.life(), "refused"
    try:
        with injector:
            done = CASES[name](life)
        if done is None or done.status is Status.SUCCESS:
            outcome = "completed"
    except (Exception, InjectedInterrupt):
        outcome = "raised"
    try:
        if life.firmware.ftl.nand.failed:
            wrong = _misuse(life, name, expected)
            lost, others = expected.judge(bench.power_on(life))
            return "failed", lost, wrong + others
        found = observe(life)
        whole = outcome == "completed" or (outcome == "raised" and found == expected.after)
        wanted = expected.after if whole else expected.undone if found == expected.undone else expected.before
        wrong = int(found != wanted)
        life.namespace.flush()
        wrong += life.do(Flush()).status is not Status.SUCCESS
        found = bench.power_on(life)
        lost = len(wanted.seqs.keys() - found.seqs.keys())
        return outcome, lost, wrong + (found != wanted)
    except FtlError:  # something that was stored cannot be read
        return "unreadable", 1, 0


# Verbs that leave the rows of sequences as they are: a failed drive goes on reading all of them
READABLE = {"create", "read", "gather", "name", "exist", "drop", "list", "log", "flush"}
READABLE |= {"block write", "large block write", "block discard", "block flush"}


def _misuse(life: Life, name: str, expected: Expected) -> int:
    """Use a failed drive. Counts what is wrong: changes that it carries out, rows that are not those before the verb or
    after it, and rows that it refuses though the verb did not change them."""
    nand = life.firmware.ftl.nand
    before = nand.writes, int(nand.erase_count.sum())
    wrong = int(life.do(GetLog(LogPage.SMART)).status is not Status.SUCCESS)
    for command in (Flush(), SeqCreate(1, 1, 1, DIM, 16), life.append(life.seqs[:1], 0, 30)):
        wrong += life.do(command).status is Status.SUCCESS
    for handle in life.seqs:
        done = [life.do(KvRead((handle,), layer)) for layer in range(LAYERS)]
        if all(each.status is Status.SUCCESS for each in done):
            rows = tuple(array.tobytes() for each in done for array in each.data)
            states = expected.before, expected.after
            wrong += rows not in [state.seqs[handle][0] for state in states if handle in state.seqs]
        else:
            wrong += name in READABLE
    return wrong + ((nand.writes, int(nand.erase_count.sum())) != before)


def events(bench: Bench, name: str) -> Iterator[tuple[Event, int, tuple[str, int]]]:
    """Each event of a verb: its kind, number, and source line."""
    for kind in ("line", "allocation"):
        life = bench.life()
        with Injector(kind) as injector:
            CASES[name](life)
        life.close()
        yield from ((kind, number, place) for number, place in enumerate(injector.seen))


@dataclass(frozen=True, slots=True)
class Task:
    """One verb, in all layouts on all media."""

    name: str
    points: int
    seed: int


def work(task: Task, tick: Tick) -> tuple[Counter[str], list[str], set[tuple[str, int]]]:
    """Interrupt a verb at `points` events, of every layout and medium as many: first at lines that were not met yet.

    Returns:
        Counts, what was found, and the source lines that were interrupted.
    """
    total, found, covered = Counter[str](), list[str](), set[tuple[str, int]]()
    draw = random.Random(f"{task.name} {task.seed}")
    pairs = [(layout, medium) for layout in LAYOUTS for medium in KINDS]
    shares = dict(zip(pairs, parts(task.points, len(pairs)), strict=True))
    for layout in LAYOUTS:
        with tempfile.TemporaryDirectory(prefix="vcsd-") as scratch:
            benches = {medium: Bench(layout, medium, Path(scratch) / medium) for medium in KINDS}
            expected = Expected.of(benches["memory"], task.name)
            every = list(events(benches["memory"], task.name))
            for medium, bench in benches.items():
                draw.shuffle(every)
                every.sort(key=lambda event: event[2] in covered)  # stable: others in random order
                for kind, at, place in every[: shares[layout, medium]]:
                    covered.add(place)
                    outcome, lost, wrong = judge(bench, task.name, expected, Injector(kind, at))
                    total.update({"points": 1, outcome: 1, kind: 1, "lost": lost, "wrong": wrong})
                    if lost or wrong:
                        where = f"{Path(place[0]).relative_to(ROOT)}:{place[1]}"
                        found.append(f"{task.name}, {medium}, layout {layout}: {kind} {at} near {where}: {outcome}")
                    tick(None)
    return total, found, covered


def parts(whole: int, count: int) -> list[int]:
    """A number cut into `count` nearly equal ones."""
    return [whole * (number + 1) // count - whole * number // count for number in range(count)]


def bench_exceptions(points: int, seed: int, jobs: int, tick: Tick = no_tick) -> dict[str, Any]:
    """Interrupt every verb on every medium in every layout, at `points` events in all."""
    tasks = [Task(name, share, seed) for name, share in zip(CASES, parts(points, len(CASES)), strict=True)]
    results = sweep(work, tasks, jobs, tick)
    total = sum((counts for counts, _, _ in results), Counter[str]())
    keys = "points", "lost", "wrong", "failed", "refused", "completed", "raised", "unreadable", "line", "allocation"
    return {key: total[key] for key in keys} | {
        "lines": len(set().union(*(covered for _, _, covered in results))),
        "verbs": len(CASES),
        "layouts": len(LAYOUTS),
        "media": len(KINDS),
        "seed": seed,
        "found": [each for _, found, _ in results for each in found],
    }


def experiment(
    points: Annotated[int, typer.Option(min=1, max=10**7, help="exceptions to raise")] = 20_500,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="random seed for the choice of events")] = 0,
    workers: Annotated[int, typer.Option(min=1, max=256, help="processes")] = 2,
) -> Outcome:
    """Raise an exception inside every verb, at lines and allocations, and compare what the drive holds afterwards.

    A drive that fails must write nothing more, go on reading, and hold its last flush after power-on.
    """
    with progress("exceptions", points) as tick:
        result = bench_exceptions(points, seed, workers, tick)
    shown = {key: value for key, value in result.items() if isinstance(value, int)}
    bad = bool(result["lost"] or result["wrong"])
    return Outcome(result, [flat_table("exceptions", shown)], result["found"][:20], failed=bad)
