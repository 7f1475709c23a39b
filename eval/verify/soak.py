"""Runs everything at once, repeatedly: decodes with churn and administration, kills of drives, and snapshots.

No token may be wrong, and no resource may grow.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from statistics import median
from threading import Event
from typing import Annotated, Any

import numpy as np
import torch
import typer

from csd_firmware import InProcessDrive
from csd_link.driveset import DriveSetConfig
from csd_link.run_dir import private_dir, run_dir
from csd_link.transports import transports
from csd_spec import (
    AttentionConfig,
    Command,
    Completion,
    CompressionBudget,
    Drive,
    DriveError,
    Flush,
    Geometry,
    KvAppend,
    KvCrop,
    KvFree,
    KvRead,
    LogPage,
    SeqCreate,
    Status,
)
from csd_spec.arrays import F16
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from vcsd.administer import admin_window, copy_drive, read_log
from vcsd.generate import Inputs, OnToken, generate
from vcsd.loading import CHECKPOINT, PROMPT, encode, load
from vcsd.options import MAX_SEED
from vcsd.progress import Tick, progress
from vcsd.session import AttachConfig, attach_with
from vcsd.transport import open_drives
from vcsd_eval.experiment import Outcome, flat

WAYS = "inproc", "process", "fuse"
# Small, so that all of its flash is reused repeatedly: 128 MiB
_FLASH = Geometry(
    channels=8, dies_per_channel=2, planes_per_die=1, blocks_per_plane=32, pages_per_block=64, page_bytes=4096
)
SPEC = replace(INSTCSD_ZYNQ7045_8CH, name="soak", geometry=_FLASH, dram_bytes=64 << 20)
LEAST_ROUNDS = 3  # two of them to warm up
MAX_ANONYMOUS_BYTES, MAX_FLASH_BYTES = 1 << 20, 16 << 20  # growth: noise of the allocator; an eighth of a drive's flash
HEADS, HEAD_DIM, MAX_ROWS = 2, 64, 2048  # of the short-lived sequences that run alongside the decodes
CHUNK_BYTES, CHUNKS = 64 << 10, 8  # bytes per access to a mounted drive; positions
_PR_SET_THP_DISABLE, _M_ARENA_MAX = 41, -8  # prctl(2), mallopt(3)


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """Resources of this process and all its descendants.

    anonymous_bytes: anonymous memory without flash_bytes, the arrays of emulated flash: these grow and shrink with the
    data and with blocks that wait for garbage collection.
    """

    anonymous_bytes: int
    flash_bytes: int
    descriptor: int
    thread: int
    mount: int
    run_folder: int

    @classmethod
    def now(cls, run: Path) -> ProcessUsage:
        """Measure now, after garbage collection and a trim of the allocator. run: parent of the run folders."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        processes = list(_family(os.getpid()))
        status = [_status(process) for process in processes]
        flash = sum(_flash_bytes(process) for process in processes)
        return cls(
            anonymous_bytes=sum(each["RssAnon"] << 10 for each in status) - flash,
            flash_bytes=flash,
            descriptor=sum(len(os.listdir(f"/proc/{process}/fd")) for process in processes),
            thread=sum(each["Threads"] for each in status),
            mount=sum(str(run) in line for line in Path("/proc/self/mounts").read_text().splitlines()),
            run_folder=len(os.listdir(run)),
        )


def _family(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from _family(int(child))


def _status(pid: int) -> dict[str, int]:
    """Numbers of /proc/PID/status, memory in KiB."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _flash_bytes(pid: int) -> int:
    """Memory of a process's arrays of flash, the only ones with the advice for huge pages (`ftl.flash.memory`)."""
    areas = Path(f"/proc/{pid}/smaps").read_text().split("VmFlags:")
    flags = (area.partition("\n")[0].split() for area in areas[1:])
    sizes = (int(area.rpartition("Anonymous:")[2].split()[0]) for area in areas[:-1])
    return sum(size << 10 for size, words in zip(sizes, flags, strict=True) if "hg" in words)


def growth(rounds: Sequence[Sequence[ProcessUsage]]) -> dict[str, int]:
    """The median of the samples of the last tenth of the rounds, less that of the tenth that ends the warm-up.

    That is two thirds of the rounds: heaps take hundreds of rounds until they are as fragmented as they become.
    """
    warm, tenth = max(2, 2 * len(rounds) // 3), max(1, len(rounds) // 10)
    ends = [list(chain(*each)) for each in (rounds[warm - tenth : warm], rounds[-tenth:])]
    grown = dict[str, int]()
    for name in (each.name for each in fields(ProcessUsage)):
        before, after = (median(getattr(usage, name) for usage in samples) for samples in ends)
        grown[f"{name}_growth".replace("_bytes_growth", "_growth_bytes")] = int(after - before)
    return grown


def by_tenth(rounds: Sequence[Sequence[ProcessUsage]]) -> list[int]:
    """Anonymous bytes at the end of each tenth of the rounds, or of each round where they are fewer."""
    parts = min(10, len(rounds))
    ends = (rounds[(part + 1) * len(rounds) // parts - 1] for part in range(parts))
    return [int(median(usage.anonymous_bytes for usage in samples)) for samples in ends]


def _done(device: Drive, command: Command) -> Completion:
    done = device.submit(command, 0).result()
    if done.status is not Status.SUCCESS:
        raise DriveError(device.name, done.status, done.reason)
    return done


def _store(device: Drive, rows: F16) -> tuple[int, ...]:
    """Create a sequence with rows (tokens, H, d) as both keys and values."""
    seqs = tuple(_done(device, SeqCreate(1, 1, HEADS, HEAD_DIM, MAX_ROWS)).data[0].tolist())
    _done(device, KvAppend(seqs, 0, np.array([len(rows)]), rows, rows))
    return seqs


def _holds(device: Drive, seqs: tuple[int, ...], rows: F16) -> bool:
    k, v = _done(device, KvRead(seqs, 0)).data
    return np.array_equal(k, rows) and np.array_equal(v, rows)


def _rows(draw: random.Random) -> F16:
    generator = np.random.default_rng(draw.randrange(1 << 32))
    return generator.standard_normal((draw.randrange(1, MAX_ROWS), HEADS, HEAD_DIM)).astype(np.float16)


def churn(device: Drive, draw: random.Random) -> int:
    """Create, append, crop, read and free a sequence; returns 1 if it read back wrong data."""
    rows = _rows(draw)
    seqs, left = _store(device, rows), draw.randrange(len(rows) + 1)
    _done(device, KvCrop(seqs, 0, np.array([left])))
    right = _holds(device, seqs, rows[:left])
    _done(device, KvFree(seqs))
    return not right


def administer(device: Drive, draw: random.Random) -> int:
    """Read log pages, through the administrator's window if the drive has one."""
    pages = LogPage.ERROR, LogPage.SMART, LogPage.WEAR, LogPage.LATENCY, LogPage.PROGRAMS, LogPage.NAMESPACE
    with ExitStack() as undo:
        if not isinstance(device, InProcessDrive):
            device = undo.enter_context(closing(admin_window(device.name)))
        for page in pages:
            read_log(device, page)
    return 0


def use_namespace(file: Path, draw: random.Random) -> int:
    """Write, flush and read a part of a mounted drive's blocks; returns 1 if the data differs."""
    data = draw.randbytes(CHUNK_BYTES)
    with file.open("r+b", buffering=0) as blocks:
        at = draw.randrange(CHUNKS) * CHUNK_BYTES
        os.pwrite(blocks.fileno(), data, at)
        os.fsync(blocks.fileno())
        return os.pread(blocks.fileno(), CHUNK_BYTES, at) != data


class Soak:
    """Rounds of all operations, on drives that run permanently and on persistent ones that are killed.

    tokens: decoded tokens. wrong_tokens, wrong_reads: tokens that differ from an undisturbed decode; reads that differ
    from the stored data.
    """

    def __init__(self, count: int, length: int, seed: int) -> None:
        """count: drives per transport; length: tokens of a decode."""
        self._count, self._length, self._draw = count, length, random.Random(seed)
        self._model, tokenizer = load(CHECKPOINT)
        self._inputs: Inputs = encode(self._model, tokenizer, PROMPT.read_text(encoding="utf-8"), 2, length, seed)
        self.ways = [way for way in WAYS if not transports()[way].missing()]
        self.tokens = self.wrong_tokens = self.wrong_reads = self.kills = self.snapshots = 0
        with open_drives(self._drives("inproc")) as devices:
            self._expected = self._generate(devices)

    @contextmanager
    def standing(self) -> Iterator[list[list[Drive]]]:
        """Drives of every transport, alive until the block ends."""
        with ExitStack() as undo:
            yield [undo.enter_context(open_drives(self._drives(way))) for way in self.ways]

    def round(self, standing: Sequence[Sequence[Drive]], sample: Callable[[], None]) -> None:
        """Use all transports once; sample: called when nothing is in flight."""
        for way, devices in zip(self.ways, standing, strict=True):
            self._side_by_side(devices)
            sample()
            self._kept(way)
            sample()

    def _drives(self, way: str, keep: Path | None = None) -> DriveSetConfig:
        return DriveSetConfig(count=self._count, spec=SPEC, transport=way, data_dir=keep)

    def _generate(self, devices: Sequence[Drive], on_token: OnToken | None = None) -> torch.Tensor:
        setting = AttachConfig(
            attention=AttentionConfig("sparf", CompressionBudget(8)), drives=devices, flush_interval_steps=4
        )
        with attach_with(self._model, setting):
            return generate(self._model, self._inputs, self._length, on_token)[0]

    def _decode(self, devices: Sequence[Drive], on_token: OnToken | None = None) -> None:
        got = self._generate(devices, on_token)
        self.tokens += got.numel()
        self.wrong_tokens += self._expected.numel() - int((got == self._expected).sum())

    def _side_by_side(self, devices: Sequence[Drive]) -> None:
        """A decode while sequences come and go, logs are read and blocks are written."""
        files = [] if isinstance(devices[0], InProcessDrive) else sorted(run_dir().glob("run-*/mount*/namespace"))
        loads: list[tuple[Any, Any]] = [(act, each) for act in (churn, administer) for each in devices]
        loads += [(use_namespace, each) for each in files]
        over = Event()

        def repeat(act: Any, where: Any, seed: int) -> int:
            draw, wrong = random.Random(seed), 0
            while not over.is_set():
                wrong += act(where, draw)
            return wrong

        with ThreadPoolExecutor(len(loads)) as pool:
            futures = [pool.submit(repeat, *load, self._draw.randrange(1 << 32)) for load in loads]
            try:
                self._decode(devices)
            finally:
                over.set()
        self.wrong_reads += sum(future.result() for future in futures)
        for device in devices:
            _done(device, Flush())

    def _kept(self, way: str) -> None:
        """Kill drives in files during a decode, reconnect, kill again, copy them; check that flushed data is intact."""
        rows, others = _rows(self._draw), set(run_dir().glob("*/pid"))
        with tempfile.TemporaryDirectory() as scratch:
            keep, copy = Path(scratch, "drives"), Path(scratch, "copy")
            for first in (True, False):
                with open_drives(self._drives(way, keep)) as devices:
                    if first:
                        _store(devices[0], rows)
                    own = sorted(set(run_dir().glob("*/pid")) - others)
                    self._decode(devices, self._killer(own) if own else None)
                    _done(devices[0], Flush())
            copy_drive(keep / "drive0", copy)
            with closing(InProcessDrive.reopen(copy)) as device:
                self.wrong_reads += not _holds(device, tuple(device.firmware.ftl.sequences), rows)
            self.snapshots += 1

    def _killer(self, own: Sequence[Path]) -> OnToken:
        """Kills a drive at a random token."""
        steps, at = iter(range(self._length)), self._draw.randrange(self._length)

        def kill(_: torch.Tensor) -> None:
            if next(steps) == at:
                os.kill(int(self._draw.choice(own).read_text()), signal.SIGKILL)
                self.kills += 1

        return kill


@contextmanager
def steady_memory() -> Iterator[None]:
    """Keep the memory of this process and its children close to the amount in use, until the block ends.

    The kernel supplies single pages, not huge ones. glibc keeps one heap instead of one per thread, and returns free
    memory at its end. Otherwise usage would vary by tens of MiB.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    libc.mallopt(_M_ARENA_MAX, 1)
    try:
        with _environment(MALLOC_ARENA_MAX="1", MALLOC_TRIM_THRESHOLD_="131072"):
            yield
    finally:
        libc.prctl(_PR_SET_THP_DISABLE, 0, 0, 0, 0)
        libc.mallopt(_M_ARENA_MAX, 0)


@contextmanager
def own_run_dir() -> Iterator[Path]:
    """Use a run folder of this process only until the block ends, so that other processes' runs are not counted."""
    folder = tempfile.TemporaryDirectory(prefix="soak-", dir=private_dir(run_dir()))
    with folder as run, _environment(VCSD_RUN_DIR=run):
        yield Path(run)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({name: value} if value is not None else {})


@torch.inference_mode()
def bench_soak(minutes: float, drives: int, tokens: int, seed: int, tick: Tick) -> dict[str, Any]:
    """Rounds until the time is over, at least three; tick: called for every minute.

    kills: of drives' processes in a decode; snapshots: copies of kept drives that were read; anonymous_growth_bytes and
    so on: of this process and the standing drives' together, see `growth`.
    """
    began, shown, rounds = time.monotonic(), 0, list[list[ProcessUsage]]()
    with steady_memory(), own_run_dir() as run:
        soak = Soak(drives, tokens, seed)
        with soak.standing() as standing:
            while len(rounds) < LEAST_ROUNDS or time.monotonic() < began + 60 * minutes:
                rounds.append([])
                soak.round(standing, lambda: rounds[-1].append(ProcessUsage.now(run)))
                while shown < (time.monotonic() - began) // 60:
                    shown += 1
                    tick(shown)
    return {
        "minutes": minutes,
        "ways": ", ".join(soak.ways),
        "rounds": len(rounds),
        "tokens": soak.tokens,
        "wrong_tokens": soak.wrong_tokens,
        "wrong_reads": soak.wrong_reads,
        "kills": soak.kills,
        "snapshots": soak.snapshots,
        **growth(rounds),
        "anonymous_bytes_by_tenth": by_tenth(rounds),
    }


def failed(result: dict[str, Any]) -> bool:
    """Whether something was wrong or grew."""
    limits = {"anonymous_growth_bytes": MAX_ANONYMOUS_BYTES, "flash_growth_bytes": MAX_FLASH_BYTES}
    judged = {name: value for name, value in result.items() if "_growth" in name or name.startswith("wrong_")}
    return any(value >= limits.get(name, 1) for name, value in judged.items())


def experiment(
    minutes: Annotated[float, typer.Option(min=0.01, max=10**5, help="duration, minutes")] = 5,
    drives: Annotated[int, typer.Option(min=1, max=4, help="number of virtual drives per transport")] = 2,
    tokens: Annotated[int, typer.Option(min=2, max=512, help="length of a decode, tokens")] = 16,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="random seed")] = 0,
) -> Outcome:
    """Decode, churn, administer, kill and snapshot drives at full load; tokens stay the same and nothing grows."""
    with progress("minutes", math.ceil(minutes)) as tick:
        result = bench_soak(minutes, drives, tokens, seed, tick)
    return flat("soak", result, failed=failed(result))
