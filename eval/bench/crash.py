"""Power cuts: every moment of a trace that uses all verbs, each followed by recovery and a comparison of all bytes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from csd_spec import DriveSpec, Geometry, KvLayout
from csd_spec.arrays import F16, U8
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from csd_spec.view import BANK_SHIFT, UNMAPPED
from eval.experiment import Outcome, flat
from ftl import Ftl, FtlError, Nand, OutOfSpace
from ftl.flash.nand import ERASED, Erase, Operation, Program
from vcsd.options import MAX_SEED
from vcsd.progress import Tick, no_tick, progress

HEADS, LAYERS, DIM = 2, 2, 16
State = dict[int, list[tuple[F16, F16]]]  # handle -> (K, V) of each layer

DRIVE: DriveSpec = replace(
    INSTCSD_ZYNQ7045_8CH,
    name="crash",
    dram_bytes=48 << 10,
    geometry=Geometry(
        channels=2, dies_per_channel=2, planes_per_die=1, blocks_per_plane=16, pages_per_block=8, page_bytes=512
    ),
)


@dataclass(slots=True)
class Trace:
    """What the array saw, and the state at each commit with the number of operations that had been done by then."""

    operations: list[Operation]
    commits: list[tuple[int, State, U8]]


class _Host:
    """Random verbs on a drive, and the same on arrays."""

    def __init__(self, seed: int) -> None:
        self.draw, self.generator = random.Random(seed), np.random.default_rng(seed)
        self.nand = Nand(DRIVE.geometry)
        self.trace = Trace([], [])
        self.nand.log = self.trace.operations.append
        self.ftl = Ftl(DRIVE, self.nand)
        self.ftl.blocks.resize(24)
        self.model: State = {}
        self.blocks = np.zeros((24, DRIVE.geometry.page_bytes), np.uint8)
        self.kept: State = {}
        self.ftl.journal.log = self._commit

    def _commit(self, recorded: set[int], freed: set[int]) -> None:
        """A commit may come in the middle of a verb: what it keeps is the state before that verb."""
        self.kept = {handle: layers for handle, layers in self.kept.items() if handle not in freed}
        self.kept |= {handle: list(self.model[handle]) for handle in recorded if handle in self.model}
        self.trace.commits.append((len(self.trace.operations), self.kept, self.blocks.copy()))

    def rows(self, tokens: int) -> F16:
        return self.generator.standard_normal((tokens, HEADS, DIM)).astype(np.float16)

    def step(self) -> None:
        """One verb; one that the full drive refuses changes nothing."""
        verbs = ("create", "append", "append", "append", "decode", "fork", "crop", "free", "relayout", "flush", "write")
        verb = self.draw.choice(verbs) if self.model else "create"
        if len(self.model) >= 6:
            verb = "free"
        try:
            getattr(self, f"_{verb}")()
        except OutOfSpace:
            if self.model:
                self._free()

    def _any(self) -> int:
        return self.draw.choice(sorted(self.model))

    def _create(self) -> None:
        m, bits = self.draw.choice([(2, 16), (4, 16), (8, 16), (8, 8), (DIM, 4)])
        layout = KvLayout(page_bytes=DRIVE.geometry.page_bytes, head_dim=DIM, m=m, bits=bits)
        (handle,) = self.ftl.create(1, LAYERS, HEADS, layout)
        self.model[handle] = [(self.rows(0), self.rows(0)) for _ in range(LAYERS)]

    def _append(self, tokens: int | None = None) -> None:
        handle, tokens = self._any(), tokens or self.draw.choice([7, 40, 90])
        for layer in range(LAYERS):
            k, v = self.rows(tokens), self.rows(tokens)
            self.ftl.append([handle], layer, np.array([tokens]), k, v, 0)
            old = self.model[handle][layer]
            self.model[handle][layer] = np.concatenate([old[0], k]), np.concatenate([old[1], v])

    def _decode(self) -> None:
        for _ in range(20):
            self._append(1)

    def _fork(self) -> None:
        handle = self._any()
        child = self.ftl.fork(handle)
        self.model[child] = list(self.model[handle])

    def _crop(self) -> None:
        handle = self._any()
        for layer in range(LAYERS):
            length = int(len(self.model[handle][layer][0]) * self.draw.random())
            self.ftl.crop(handle, layer, length, 0)
            k, v = self.model[handle][layer]
            self.model[handle][layer] = k[:length], v[:length]

    def _free(self) -> None:
        handle = self._any()
        self.ftl.free([handle], 0)
        del self.model[handle]

    def _relayout(self) -> None:
        self.ftl.relayout(self._any(), self.draw.choice([2, 4, 8]), 0)

    def _flush(self) -> None:
        self.ftl.flush(0)

    def _write(self) -> None:
        lpns = np.array(self.draw.sample(range(24), 3))
        data = self.generator.integers(0, 255, (3, DRIVE.geometry.page_bytes), dtype=np.uint8)
        self.ftl.blocks.write(lpns, data, 0)
        self.blocks[lpns] = data


def record(seed: int, operations: int) -> Trace:
    """Run random verbs until the array has seen at least `operations` programs and erases."""
    host = _Host(seed)
    while len(host.trace.operations) < operations:
        host.step()
    return host.trace


def _apply(nand: Nand, operation: Operation) -> None:
    if isinstance(operation, Erase):
        pages = nand.pages_of(operation.block)
        nand.content[pages], nand.write_numbers[pages], nand.tags[pages] = ERASED, 0, 0
        nand.erase_count[operation.block] += 1
        return
    at = operation.ppn
    nand.content[at], nand.tags[at] = operation.page, operation.tag
    nand.write_numbers[at], nand.checksums[at] = operation.write_number, operation.checksum


def _tear(nand: Nand, operation: Operation, generator: np.random.Generator) -> Callable[[], None]:
    """Leave an operation half done, in one of the ways in which that can happen; returns what undoes it."""
    pages = np.array([operation.ppn]) if isinstance(operation, Program) else nand.pages_of(operation.block)
    arrays: list[NDArray[Any]] = [nand.content, nand.tags, nand.write_numbers, nand.checksums]
    before = [array[pages].copy() for array in arrays]
    if isinstance(operation, Program):
        spare = generator.random() < 0.5  # the spare area may be whole while the data is not
        cut = int(generator.integers(1, operation.page.size))
        if spare:
            _apply(nand, operation)
        nand.content[operation.ppn, :cut] = operation.page[:cut]
        nand.content[operation.ppn, cut:] = generator.integers(0, 255, operation.page.size - cut)
    else:
        gone = pages[generator.random(pages.size) < 0.5]
        nand.content[gone], nand.write_numbers[gone], nand.tags[gone] = ERASED, 0, 0

    def undo() -> None:
        for array, old in zip(arrays, before, strict=True):
            array[pages] = old

    return undo


def _judge(nand: Nand, expected: State, blocks: U8, newer: set[bytes]) -> tuple[int, int]:
    """Recover, and count sequences or logical pages that are lost and that are wrong."""
    nand.power_on()
    try:
        ftl = Ftl(DRIVE, nand)
    except FtlError:
        return len(expected), 0
    lost = wrong = 0
    for handle, layers in expected.items():
        seq = ftl.sequences.get(handle)
        if seq is None or seq.failed:
            lost += 1
            continue
        for layer, (k, v) in enumerate(layers):
            if len(k) != seq.lengths[layer]:
                wrong += 1
            elif len(k):
                stored_k, stored_v, plan = ftl.read_back(handle, layer)
                good = nand.intact(plan.ppns).all() and np.array_equal(stored_k, k) and np.array_equal(stored_v, v)
                wrong += not (good and np.array_equal(embedding_rows(ftl, handle, layer), k))
    wrong += len(set(ftl.sequences) - set(expected))
    if expected:
        for lpn in range(ftl.blocks.pages):
            found = ftl.blocks.read(np.array([lpn]), 0)[0][0].tobytes()
            wrong += found != blocks[lpn].tobytes() and found not in newer
    return lost, wrong


def embedding_rows(ftl: Ftl, handle: int, layer: int) -> F16:
    """K of a layer as its embedding-indexed copy has it, (S, H, d); K itself where that has no pages.

    Of a copy in few bits: NaN where its codes are not those of K.
    """
    view, seq = ftl.view([handle], layer), ftl.sequence(handle)
    layout, rows = seq.layout, ftl.read_back(handle, layer)[0].view(np.uint16)
    slots = view.e_slots.reshape(seq.heads, layout.embedding_pages, -1)
    for group in np.flatnonzero(slots[0, 0] != UNMAPPED).tolist():
        pages = [[view.banks[slot >> BANK_SHIFT][slot & 0x7FFFFFFF] for slot in head[:, group]] for head in slots]
        there = rows[group * layout.T : (group + 1) * layout.T]
        if layout.bits < 16:
            codes = seq.maps["embedding_k"].pack(there)[:, 0]
            if not np.array_equal(np.concatenate(pages)[:, : codes.shape[1]], codes):
                there[:] = 0xFFFF
            continue
        by_token = np.array(pages).reshape(seq.heads, -1, layout.T).transpose(2, 0, 1)
        there[:] = by_token[: there.shape[0], :, : layout.head_dim]
    return rows.view(np.float16)


def bench_crash(cuts: int, seed: int, tick: Tick = no_tick) -> dict[str, Any]:
    """Cut the power before, in the middle of and after every operation of a trace; `cuts` is the least number.

    Three traces of other seeds, four times as long, are cut at random moments, a tenth as often in all. lost:
    sequences that a commit had and recovery did not find. wrong: sequences, tokens or logical pages that are not those
    of the last commit, byte for byte. recovered: cuts after which all was right.
    """
    operations = -(-cuts // 2)
    total = _sweep(seed, operations, 1.0, tick)
    every = total["cuts"]
    for longer in range(1, 4):
        total += _sweep(seed + 1000 * longer, 4 * operations, 0.1 / 12, tick)
    counts = {key: total[key] for key in ("cuts", "lost", "wrong", "recovered", "commits")}
    return counts | {"cuts_of_every_moment": every, "cuts_at_random": total["cuts"] - every, "seed": seed}


def _sweep(seed: int, operations: int, share: float, tick: Tick) -> Counter[str]:
    """Record a trace and cut it at this share of its moments."""
    trace, total = record(seed, operations), Counter[str]()
    generator = np.random.default_rng(seed)
    nand, commit = Nand(DRIVE.geometry), 0
    empty: tuple[State, U8] = ({}, np.zeros((24, DRIVE.geometry.page_bytes), np.uint8))
    for number in range(len(trace.operations) + 1):
        while commit < len(trace.commits) and trace.commits[commit][0] <= number:
            commit += 1
        ways = [None] if number == len(trace.operations) else [None, trace.operations[number]]
        for torn in ways if generator.random() < share else []:
            state, blocks = trace.commits[commit - 1][1:] if commit else empty
            end = trace.commits[commit][2] if commit < len(trace.commits) else blocks
            since = {page.tobytes() for page in end} | {
                op.page.tobytes()
                for op in trace.operations[trace.commits[commit - 1][0] if commit else 0 : number]
                if isinstance(op, Program)
            }
            undo = _tear(nand, torn, generator) if torn else None
            missing, bad = _judge(nand, state, blocks, since)
            if undo:
                undo()
            total.update(cuts=1, lost=missing, wrong=bad, recovered=int(not (missing or bad)))
            tick(None)
        if number < len(trace.operations):
            _apply(nand, trace.operations[number])
    total["commits"] = len(trace.commits)
    return total


def experiment(
    cuts: Annotated[int, typer.Option(min=2, max=10**9, help="cut points at the least")] = 10_000,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="of the trace")] = 0,
) -> Outcome:
    """Cut the power at every moment of a trace of all verbs, and at random in longer ones; then compare every byte."""
    with progress("power cuts", cuts + cuts // 10) as tick:
        result = bench_crash(cuts, seed, tick)
    return flat("power cuts", result, failed=bool(result["lost"] or result["wrong"]))
