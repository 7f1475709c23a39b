"""A drive that runs, is killed and restarts, and its expected contents after the restart."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from csd_firmware import Firmware
from csd_firmware.folder import FolderLock
from csd_firmware.tenants import Tenant
from csd_io.folder import DiskFolder, Durability
from csd_io.medium import BLOCK, IN_MEMORY, Medium
from csd_link.drive_end import WindowController
from csd_link.window import Identity, WindowLayout
from csd_spec import Attend, Completion, KvAppend, KvCrop, KvFree, SeqCreate, SeqFork, SeqSweep, Status
from csd_spec.arrays import F16
from ftl import FtlError, MediaFailedError, Nand
from ftl.flash import tag
from ftl.flash.files import NandFiles
from vcsd_eval.verify.injector import Event, Injected, InjectedInterrupt, Injector
from vcsd_eval.verify.random_host import DIM, DRIVE, as_stored
from vcsd_eval.verify.simulation.disk import Killed, MirroredDisk, SimDisk
from vcsd_eval.verify.simulation.link import Clock, Side, SimulatedLink

State = dict[int, list[tuple[F16, F16]]]  # handle -> (keys, values) of each layer
TENANTS = ("alice", "bob")
LAYOUT = WindowLayout(depth=2, slot_blocks=16)
MEDIA = IN_MEMORY, IN_MEMORY, Medium("direct", BLOCK)  # the last with a cache of one block
SECRET = bytes(32)
EVENTS: tuple[Event, ...] = "line", "allocation"
MAX_EVENT = 1500  # of a command, at which it is interrupted; shorter ones are completed


def _nothing() -> None: ...


class SimDrive:
    """Firmware over a simulated disk, with a window for each tenant.

    `model` is its expected contents, by its own handles; `commits` are the states allowed after a restart.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        clock: Clock,
        draw: random.Random,
        durability: Durability,
        links: dict[str, SimulatedLink],
    ) -> None:
        self.name, self.folder, self.clock, self.draw, self.links = name, folder, clock, draw, links
        self.medium, self._media = draw.choice(MEDIA), ExitStack()
        self.disk = self._disk(durability)
        NandFiles.make(self.disk, DRIVE.geometry)
        self.model: State = {}
        self.commits: list[State] = [{}]
        self.coming: list[State] = []
        self.lives = self.lost = self.wrong = self.reported = 0
        self.rotten = False  # damage beyond correction
        self.injector: Injector | None = None  # interrupts the next command
        self.interrupted = 0
        self._files_at_start: dict[str, bytes] = {}
        self._flushes = 0  # since then
        self.up_at: float | None = None
        self.ends: list[WindowController] = []
        self.start()

    @property
    def alive(self) -> bool:
        return bool(self.ends)

    def start(self) -> None:
        """Power on, and check the recovered contents."""
        self.up_at, self.lives = None, self.lives + 1
        self._hold = FolderLock(self.folder)
        self.disk.synced = _nothing  # power-on syncs the recovered state, which is checked first
        try:
            self.firmware = self._firmware()
            self.judge()
            self.disk.synced = self._synced
            self.firmware.ftl.journal.begins, self.firmware.ftl.journal.log = self._begin, self._commit
            step = partial(self._interruptible, self.firmware.step)
            self.firmware.step = lambda command, *rest: self._noted(command, step(command, *rest))  # type: ignore[method-assign]  # watched from outside
            self._files_at_start = {name: bytes(content) for name, content in self.disk.files.items()}
            self._flushes = 0
            identity = Identity(self.name, DRIVE, LAYOUT, True)
            for link in self.links.values():
                link.news["drive"] = True
            self.ends = [
                WindowController(Side(link, "drive"), identity, Tenant(self.firmware, SECRET, tenant))
                for tenant, link in self.links.items()
            ]
        except Killed:
            self.die()
        except MediaFailedError:
            if not self.disk.fault:
                raise
            self.disk.fault = 0  # the administrator repairs the disk and reopens the drive
            self.die()

    def _disk(self, durability: Durability) -> SimDisk:
        """In memory; with a medium that reads files, mirrored in files."""
        if self.medium.kind == "memory":
            return SimDisk(self.name, durability, self.draw)
        (files := self.folder / "files").mkdir()
        return MirroredDisk(DiskFolder(files), durability, self.draw)

    def _firmware(self) -> Firmware:
        nand = Nand(DRIVE.geometry, folder=self.disk, medium=self.medium)
        self._media.callback(nand.page_store.close)
        return Firmware(DRIVE, nand)

    def pump(self) -> None:
        """Run one iteration of the firmware's loop."""
        if self.up_at is not None and self.clock.now >= self.up_at:
            self.start()
        try:
            for end, link in zip(self.ends, self.links.values(), strict=bool(self.ends)):
                if self.draw.random() < 0.2:
                    end.beat()
                link.deliver()
                while link.news["drive"]:
                    link.news["drive"] = end.accept_host() or end.serve()
        except Killed:
            self.die()

    def die(self) -> None:
        """Kill the process; it is restarted after a delay."""
        self.disk.process_died()
        self._down()

    def lose_power(self) -> tuple[int, int]:
        """Cut the machine's power; returns the numbers of lost and torn writes."""
        gone = self.disk.lose_power()
        self._down()
        return gone

    def _down(self) -> None:
        self.ends = []
        self.commits, self.coming = self.commits + self.coming, []
        self._hold.close()
        self._media.close()
        for link in self.links.values():
            link.deaths["drive"] = -1
        self.up_at = self.clock.now + self.draw.random() * 2

    def close(self) -> None:
        """Release the folder."""
        self._hold.close()
        self._media.close()
        if isinstance(self.disk, MirroredDisk):
            self.disk.close()

    def serve_twice(self) -> bool:
        """Start a second server on the same folder; returns whether it was refused."""
        try:
            other = FolderLock(self.folder)
        except ValueError:
            return True
        with closing(other), suppress(Killed):
            intruder = self._firmware()
            done = intruder.step(SeqCreate(1, 1, 2, DIM, 64), 0)
            seqs, rows = tuple(done.data[0].tolist()), np.ones((60, 2, DIM), np.float16)
            intruder.step(KvAppend(seqs, 0, np.array([60]), rows, rows), 0)
            intruder.ftl.flush(0)
        return False

    def rot_record(self) -> bool:
        """Damage both copies of a page of a journal record beyond correction; returns whether there was one."""
        nand = self.firmware.ftl.nand
        pages = self.firmware.ftl.journal.pages
        numbers, places, *_ = tag.record_fields(nand.tags[pages])
        inner = [n for n in set(numbers.tolist()) if n < numbers.max()] if pages.size else []
        if not inner:
            return False
        number = self.draw.choice(sorted(inner))
        size = DRIVE.geometry.page_bytes
        for place in (0, 1):
            for ppn in pages[(numbers == number) & (places == place)][:1].tolist():
                for _ in range(9):
                    self.disk.flip("content.bin", 8 * ppn * size + self.draw.randrange(8 * size))
        self.rotten = True
        return True

    def interrupt_next(self) -> None:
        """Let an exception come at a random line or allocation of the next command."""
        self.injector = Injector(self.draw.choice(EVENTS), self.draw.randrange(MAX_EVENT))

    def _interruptible(self, step: Callable[..., Completion], *command: Any) -> Completion:
        """Run a command. The process ends with an exception, and if the drive fails; others refuse the command."""
        if self.injector is None:
            return step(*command)
        injector, self.injector = self.injector, None
        try:
            with injector:
                done = step(*command)
        except (Injected, InjectedInterrupt) as error:
            raise Killed from error
        finally:
            self.interrupted += injector.has_raised
        if self.firmware.ftl.nand.failed:
            raise Killed
        return done

    def mix_files(self) -> str:
        """Open the folder of a dead drive with some files as they were at its last start, then put those of now back.

        Returns:
            What is wrong: the drive opened, has not what it has to have, and found nothing. "" if all is well.
        """
        names = sorted(self._files_at_start)
        older = self.draw.sample(names, self.draw.randrange(1, len(names)))
        newer = self.disk.swap({name: self._files_at_start[name] for name in older})
        try:
            self.firmware = self._firmware()
            lost, wrong = min((self._differs(commit) for commit in self.commits), key=sum)
            noticed = not wrong and (not lost or self.firmware.ftl.findings)
            return "" if noticed else f"older {', '.join(older)}: {lost} sequences lost, {wrong} wrong, none reported"
        except ValueError as error:
            return "" if all(f"{name} is older" in str(error) for name in older) else f"refused, but as {error}"
        finally:
            self._media.close()
            self.disk.swap(newer)

    @property
    def is_mixable(self) -> bool:
        """Whether something was flushed since its start, so that files of then are to be noticed."""
        return self.alive and self._flushes > 0

    def _noted(self, command: Any, done: Completion) -> Completion:
        """Apply the command to the model."""
        if done.status is Status.SUCCESS:
            match command:
                case SeqCreate():
                    empty = np.zeros((0, command.kv_heads, command.head_dim), np.float16)
                    self.model |= {int(h): [(empty, empty)] * command.layers for h in done.data[0]}
                case KvAppend():
                    cuts = np.cumsum(command.lengths)[:-1]
                    parts = np.split(command.k, cuts), np.split(command.v, cuts)
                    for seq, k, v in zip(command.seqs, *parts, strict=True):
                        self._grow(seq, command.layer, k, v)
                case Attend():
                    for seq, k, v in zip(command.seqs, command.k, command.v, strict=True):
                        self._grow(seq, command.layer, k[None], v[None])
                case KvCrop():
                    for seq, length in zip(command.seqs, command.lengths.tolist(), strict=True):
                        k, v = self.model[seq][command.layer]
                        self._set(seq, command.layer, k[:length], v[:length])
                case SeqFork():
                    forks = zip(done.data[0].tolist(), command.seqs, command.lengths.tolist(), strict=True)
                    for handle, seq, length in forks:
                        self.model[handle] = [(k[:length], v[:length]) for k, v in self.model[seq]]
                case KvFree():
                    for seq in command.seqs:
                        del self.model[seq]
                case SeqSweep():
                    self.model = {seq: each for seq, each in self.model.items() if seq in self.firmware.ftl.sequences}
        return done

    def _grow(self, seq: int, layer: int, k: Any, v: Any) -> None:
        old_k, old_v = self.model[seq][layer]
        form, grown = self.firmware.ftl.sequence(seq).layout, (np.concatenate([old_k, k]), np.concatenate([old_v, v]))
        self._set(seq, layer, *as_stored(form, len(old_k), *grown))

    def _set(self, seq: int, layer: int, k: Any, v: Any) -> None:
        layers = list(self.model[seq])
        layers[layer] = k, v
        self.model[seq] = layers

    def _begin(self, recorded: set[int], freed: set[int]) -> None:
        """Record the state before the current verb; the drive may be killed once the commit counts."""
        kept = {seq: layers for seq, layers in self.commits[-1].items() if seq not in freed}
        self.coming = [kept | {seq: self.model[seq] for seq in recorded if seq in self.model}]

    def _commit(self, recorded: set[int], freed: set[int]) -> None:
        self.commits += self.coming
        self.coming = []
        self._flushes += 1
        if self.disk.durability == "process":
            self._synced()

    def _synced(self) -> None:
        del self.commits[:-1]

    def judge(self) -> None:
        """Compare the recovered contents with the allowed states."""
        ftl = self.firmware.ftl
        if self.rotten and ftl.findings:  # refused data is reported as lost; the rest must be correct
            self.reported += 1
            good = {seq for seq, sequence in ftl.sequences.items() if not sequence.failed}
            self.commits = [{seq: layers for seq, layers in commit.items() if seq in good} for commit in self.commits]
        self.rotten = False
        losses = [self._differs(commit) for commit in self.commits]
        best = min(range(len(losses)), key=lambda i: sum(losses[i]))
        self.lost += losses[best][0]
        self.wrong += losses[best][1]
        self.commits = [self.commits[best]]
        self.model = dict(self.commits[0])

    def _differs(self, commit: State) -> tuple[int, int]:
        """Numbers of sequences of a commit that are missing, and of those that differ."""
        ftl, found = self.firmware.ftl, Counter[str]()
        for seq, layers in commit.items():
            if seq not in ftl.sequences or ftl.sequences[seq].failed:
                found["lost"] += 1
                continue
            for layer, (k, v) in enumerate(layers):
                try:
                    rows = ftl.read_back(seq, layer)[:2]
                except FtlError:
                    found["lost"] += 1
                    break
                if [row.tobytes() for row in rows] != [k.tobytes(), v.tobytes()]:  # a manifest may hold NaN
                    found["wrong"] += 1
                    break
        others = {seq for seq, sequence in ftl.sequences.items() if not sequence.failed} - set(commit)
        return found["lost"], found["wrong"] + len(others)
