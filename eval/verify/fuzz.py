"""Mutated commands and window images, and random Key Value commands, against a drive that two tenants share.

The fuzzer is guided by coverage: an input that reaches a pair of lines of the decoding and checking code that none
reached before is kept, and mutated further. (The lines are watched with `sys.settrace`, at first for every input, later
for one in sixteen.)
"""

from __future__ import annotations

import itertools
import random
import signal
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any

import numpy as np

from csd_firmware import Firmware
from csd_firmware.tenants import Tenant
from csd_io.medium import Kind as MediumKind
from csd_link.drive_end import WindowController
from csd_link.host_end import DriveLostError, WindowHost
from csd_link.nvmeof.commands import CommandError, Sqe
from csd_link.window import BLOCK_BYTES, BODY_BYTES, BlockKind, ControlBlock, Identity, WindowLayout
from csd_link.wire import ENTRY, PARAMETERS, WireRequest, encode
from csd_spec import (
    LAYOUTS,
    Command,
    Completion,
    DriveSpec,
    Geometry,
    KvAppend,
    KvRead,
    SeqCreate,
    Status,
)
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from csd_spec.verbs import VERBS, SequenceAccess
from vcsd.progress import Tick
from vcsd_eval.verify.coverage import Coverage
from vcsd_eval.verify.fuzz_values import FuzzedValues
from vcsd_eval.verify.tested_storage import Place, place

HANG_S = 10.0  # longer than compiling a kernel that no valid command has used
LAYOUTS_USED = tuple(LAYOUTS[name].code for name in ("fp16", "progressive", "progressive4-exact"))
RENEW = 2000  # inputs per world
IMAGES = 0.2  # share of inputs that damage the window instead of a command
VALUES = 0.1  # share of inputs that are Key Value commands
H, G, D = 2, 2, 16

DRIVE: DriveSpec = replace(
    INSTCSD_ZYNQ7045_8CH,
    name="fuzz",
    dram_bytes=1 << 16,  # 1/16 of the flash: the journal's reserve is too small for the tables of more (docs/drives.md)
    geometry=Geometry(
        channels=2, dies_per_channel=2, planes_per_die=1, blocks_per_plane=32, pages_per_block=16, page_bytes=512
    ),
)
IDENTITY = Identity("fuzz", DRIVE, WindowLayout(depth=2, slot_blocks=4))
ODD = (0, 1, 2, 3, 7, 8, 255, 256, 65535, 65536, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
ODD_WIDE = (*ODD, 1 << 32, 1 << 52, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


class InputHangError(BaseException):
    """An input took too long."""


class MemoryWindow:
    """A window's medium in memory."""

    def __init__(self) -> None:
        self.blocks = IDENTITY.layout.blocks
        self.data = bytearray(self.blocks * BLOCK_BYTES)

    def read(self, block: int, count: int = 1) -> bytearray:
        return self.data[block * BLOCK_BYTES : (block + count) * BLOCK_BYTES]

    def write(self, block: int, data: bytes | bytearray | memoryview) -> None:
        self.data[block * BLOCK_BYTES : block * BLOCK_BYTES + len(data)] = data


class FuzzWorld:
    """A drive with one tenant that has data (the victim), and a window for a second one (the attacker)."""

    def __init__(self, seed: int, where: Place, layout: int) -> None:
        generator = np.random.default_rng(seed)
        self.firmware, secret = Firmware(DRIVE, where.array()), b"s" * 32
        self.victim, self.attacker = Tenant(self.firmware, secret, "victim"), Tenant(self.firmware, secret, "attacker")
        self.rows = generator.standard_normal((40, H, D)).astype(np.float16)
        self.marks = [row.tobytes() for row in self.rows[::7, 0, :8]]
        self.secret_handle = self._fill(self.victim, self.rows, layout)
        self.broken = False  # a command was stopped halfway
        self.values = FuzzedValues(self.firmware, self.rows[:20].tobytes())
        self.kept = self.victim.step(KvRead((self.secret_handle,), 0), 0).data
        self.own_handle = self._fill(self.attacker, np.ones((30, H, D), np.float16), layout)
        self.medium = MemoryWindow()
        self.drive = WindowController(self.medium, IDENTITY, self.attacker)
        self.attach()

    def _fill(self, tenant: Tenant, rows: Any, layout: int) -> int:
        handle = int(tenant.step(SeqCreate(1, 2, H, D, 512, layout), 0).data[0][0])
        tenant.step(KvAppend((handle,), 0, np.array([len(rows)]), rows, rows), 0)
        return handle

    def attach(self) -> None:
        """Attach a new host of the attacker, regardless of the contents of the window."""
        self.host = WindowHost(self.medium)
        self.drive.beat()
        self.host.attach()
        self.drive.accept_host()
        if not self.host.attach():
            raise AssertionError("a host could not attach")

    def seeds(self) -> list[Command]:
        """Valid commands of the attacker, and some that address the victim's data."""
        own, rows = (self.own_handle,), np.ones((100, H, D), np.float16)
        commands: list[Command] = [KvAppend(own, 1, np.array([100]), rows, rows)]
        for seqs in (own, (self.secret_handle,), (1,)):
            verbs = [verb for verb in VERBS.values() if verb.access is not SequenceAccess.NONE or seqs == own]
            commands += [verb.example(seqs, H=H, G=G, d=D) for verb in verbs]
        return commands

    def state(self) -> tuple[Any, ...]:
        """State that a refused command must not change, with exceptions: see `changed`."""
        ftl = self.firmware.ftl
        lengths, moved = tuple((handle, *seq.lengths) for handle, seq in ftl.sequences.items()), ftl.counters.moved
        unchanged = lengths, ftl.nand.writes - moved, ftl.buffers.left, self.firmware.free_ns
        return unchanged, moved, ftl.timing.idle_ns()

    def changed(self, before: tuple[Any, ...]) -> bool:
        """Whether something changed since `before`.

        On a full drive the collector may have moved pages in search of room, which takes time of the flash alone.
        """
        unchanged, moved, _ = now = self.state()
        return now != before and (unchanged != before[0] or moved == before[1])

    def victim_has_its_data(self) -> bool:
        """Whether the victim's data is intact."""
        done = self.victim.step(KvRead((self.secret_handle,), 0), 0)
        return done.status is Status.SUCCESS and all(map(np.array_equal, done.data, self.kept))


@dataclass(slots=True)
class Findings:
    """Counts of failures, and a description of the first of each kind."""

    crashes: int = 0
    hangs: int = 0
    leaks: int = 0
    changes: int = 0  # of state, by refused commands
    wrong: int = 0  # Key Value commands, and values after a loss of power
    accepted: int = 0
    notes: list[str] = field(default_factory=list)

    def note(self, kind: str, what: object) -> None:
        setattr(self, kind, getattr(self, kind) + 1)
        if len(self.notes) < 20:
            self.notes.append(f"{kind}: {what}")


def bench_fuzz(inputs: int, seed: int, tick: Tick, medium: MediumKind = "memory") -> dict[str, Any]:
    """Run `inputs` inputs. A crash is an exception that leaves an end of the window, or an internal error."""
    before = signal.signal(signal.SIGALRM, _alarm)
    try:
        with place(medium, DRIVE.geometry) as where:
            return {"medium": medium} | _fuzz(inputs, seed, where, tick)
    finally:
        signal.signal(signal.SIGALRM, before)


def _fuzz(inputs: int, seed: int, where: Place, tick: Tick) -> dict[str, Any]:
    draw, findings, coverage = random.Random(seed), Findings(), Coverage()
    worlds = itertools.cycle([partial(FuzzWorld, seed, where, layout) for layout in LAYOUTS_USED])
    for _ in LAYOUTS_USED:  # compile kernels first: compilation must not count as a hang
        world = next(worlds)()
        for command in world.seeds():
            world.attacker.step(command, 0)
    began, world = time.perf_counter(), next(worlds)()
    corpus = [encode(command) for command in world.seeds()]
    handles = {world.own_handle: 0, world.secret_handle: 0}
    for number in range(inputs):
        if (number % RENEW == 0 and number) or world.broken:
            world = _renewed(world, findings, next(worlds))
        if draw.random() < IMAGES:
            _guard(world, findings, partial(_image, world, draw, findings), "window image")
        elif draw.random() < VALUES:
            sqe, data = world.values.command(draw)
            _guard(world, findings, partial(_key_value, world, sqe, data, findings), sqe)
        else:
            request, submit_ns = mutated(corpus, list(handles), draw), draw.choice((0, 0, 0, *ODD_WIDE))
            reached = len(coverage.pairs)
            run = _command(world, request, submit_ns, findings)
            if number < 4 * RENEW or number % 16 == 0:
                with coverage.watch(request.opcode):
                    _guard(world, findings, run, request)
            else:
                _guard(world, findings, run, request)
            if len(coverage.pairs) > reached and len(request.payload) < 1 << 14:
                corpus.append(request)
        if number % 10_000 == 9_999:
            tick(None)
    _renewed(world, findings, next(worlds))
    return {
        "inputs": inputs,
        "crashes": findings.crashes,
        "hangs": findings.hangs,
        "leaks": findings.leaks,
        "state_changes": findings.changes,
        "values_wrong": findings.wrong,
        "accepted": findings.accepted,
        "line_pairs": len(coverage.pairs),
        "corpus": len(corpus),
        "inputs_per_s": inputs / (time.perf_counter() - began),
        "notes": findings.notes,
    }


def _renewed(world: FuzzWorld, findings: Findings, another: Callable[[], FuzzWorld]) -> FuzzWorld:
    if not world.victim_has_its_data():
        findings.note("leaks", "another tenant's data was changed")
    if not world.broken and (lost := world.values.lost()):
        findings.note("wrong", f"{lost} values after a loss of power")
    return another()


def _key_value(world: FuzzWorld, sqe: Sqe, data: bytes, findings: Findings) -> None:
    """A Key Value command of the attacker's."""
    before = world.state()
    done, wrong = world.values.run(sqe, data)
    if wrong:
        findings.note("wrong", f"{wrong}: {sqe}")
    if isinstance(done, CommandError):
        if world.changed(before):
            findings.note("changes", sqe)
    elif any(mark in bytes(part) for part in done.data for mark in world.marks):
        findings.note("leaks", sqe)


def _alarm(number: int, frame: FrameType | None) -> None:
    raise InputHangError


def _guard(world: FuzzWorld, findings: Findings, run: Callable[[], None], what: object) -> None:
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        run()
    except InputHangError:
        world.broken = True
        findings.note("hangs", what)
    except Exception as error:  # noqa: BLE001 - counted as a crash
        findings.note("crashes", f"{type(error).__name__}: {error}: {what}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _command(world: FuzzWorld, request: WireRequest, submit_ns: int, findings: Findings) -> Callable[[], None]:
    """Write a request directly into the ring, as a host that ignores the protocol would."""

    def run() -> None:
        before, host, layout = world.state(), world.host, IDENTITY.layout
        payload = request.payload
        inline = len(payload) <= BODY_BYTES - ENTRY.size
        if not inline:
            world.medium.write(layout.to_drive(host.begun), payload[: layout.slot_bytes])
        values = (*request.parameters, *(0,) * PARAMETERS)[:PARAMETERS]
        entry = ENTRY.pack(request.opcode, 0, 0, 1, submit_ns, len(payload), zlib.crc32(payload), *values)
        body = entry + payload if inline else entry
        block = ControlBlock(BlockKind.REQUEST, host.host, host.drive, host.begun, body)
        world.medium.write(layout.request(host.begun), block.pack())
        host.begun += 1
        world.drive.serve()
        done = host.poll()
        if done is None:
            raise AssertionError("a request without a completion")
        _judge(world, done, before, findings, request)

    return run


def _judge(world: FuzzWorld, done: Completion, before: tuple[Any, ...], findings: Findings, what: object) -> None:
    if done.status is Status.INTERNAL_ERROR:
        findings.note("crashes", f"{done.reason}: {what}")
    if done.status is Status.SUCCESS:
        findings.accepted += 1
    elif world.changed(before):
        findings.note("changes", f"{done.reason}: {what}")
    if any(mark in array.tobytes() for array in done.data for mark in world.marks):
        findings.note("leaks", what)


def _image(world: FuzzWorld, draw: random.Random, findings: Findings) -> None:
    """Damage blocks of a window in use; both ends go on, and a host can attach again."""
    before, layout = world.state(), IDENTITY.layout
    blocks = (0, 1, *(layout.request(n) for n in range(2)), *(layout.completion(n) for n in range(2)))
    if world.host.has_free_slot:
        world.host.submit(encode(KvRead((world.secret_handle,), 0)), 0)
    for _ in range(draw.randint(1, 3)):
        at = draw.choice(blocks) * BLOCK_BYTES
        if draw.random() < 0.3:
            source = draw.choice(blocks) * BLOCK_BYTES
            world.medium.data[at : at + 256] = world.medium.data[source : source + 256]
        else:
            world.medium.data[at + draw.randrange(160)] = draw.randrange(256)
        if draw.random() < 0.5:
            _fix_crc(world.medium.data, at)
    world.drive.serve()
    world.drive.accept_host()
    try:
        done = world.host.poll()
        world.host.check_heartbeat()
        WindowHost(world.medium).attach()
    except (DriveLostError, ValueError):
        done = None
    if done is not None:
        _judge(world, done, before, findings, "window image")
    elif world.changed(before):
        findings.note("changes", "window image")
    world.attach()


def _fix_crc(data: bytearray, at: int) -> None:
    """Correct the checksum of a damaged control block, so that its contents are examined."""
    size = int.from_bytes(data[at + 12 : at + 16], "little")
    if size <= BODY_BYTES:
        crc = zlib.crc32(data[at + 44 : at + 44 + size], zlib.crc32(data[at : at + 40]))
        data[at + 40 : at + 44] = crc.to_bytes(4, "little")


def mutated(corpus: list[WireRequest], handles: list[int], draw: random.Random) -> WireRequest:
    """A request of the corpus with one to four changes."""
    chosen = draw.choice(corpus)
    opcode, parameters, payload = chosen.opcode, list(chosen.parameters), bytearray(chosen.payload)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        match draw.randrange(12):
            case 0:
                opcode = draw.choice((*(verb.opcode for verb in VERBS.values()), draw.randrange(256)))
            case 1 | 2 | 3 if parameters:
                at = draw.randrange(len(parameters))
                near = parameters[at] + draw.choice((-1, 1, 1 << draw.randrange(32)))
                parameters[at] = draw.choice((*ODD, near)) & 0xFFFFFFFF
            case 4 | 5 | 6 if payload:
                payload[draw.randrange(len(payload))] ^= 1 << draw.randrange(8)
            case 7 | 8 if len(payload) >= 8:
                at = draw.randrange(min(8, len(payload) // 8)) * 8
                value = draw.choice((*ODD_WIDE, *handles, draw.choice(handles) ^ 1 << draw.randrange(64)))
                payload[at : at + 8] = value.to_bytes(8, "little")
            case 9:
                del payload[draw.randrange(len(payload) + 1) :]
            case 10:
                payload += draw.randbytes(draw.choice((1, 2, 8, 64)))
            case _:
                other = draw.choice(corpus)
                parameters = list(other.parameters) if draw.random() < 0.5 else parameters
                payload = bytearray(other.payload) if draw.random() < 0.5 else payload
    return WireRequest(opcode, tuple(parameters), bytes(payload))
