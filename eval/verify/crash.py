"""Power cuts at every moment of a trace that uses all verbs; each is followed by recovery and a comparison of all
bytes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from csd_io.medium import Kind
from csd_spec import KvSlotView
from csd_spec.arrays import F16, U8
from csd_spec.view import BANK_SHIFT, UNMAPPED, in_flash
from ftl import Ftl, FtlError, Nand, UncorrectableReadError
from ftl.flash.operations import Erase, Operation, Program
from ftl.flash.spare import SPARE
from ftl.kv.layouts.coarse import decode_scores, decode_values
from ftl.kv.layouts.codes import to_fp32
from ftl.kv.layouts.group_map import PackedMap
from ftl.kv.values import VALUES
from vcsd.progress import Tick, no_tick
from vcsd_eval.verify.random_host import DRIVE, KEYS, LOGICAL_PAGES, VALUE_KEYS, RandomHost, State, is_stored
from vcsd_eval.verify.simulation.disk import Killed
from vcsd_eval.verify.tested_storage import Place, place

MISSED = {
    2: 0.5,
    4: 0.16,
}  # by bits: largest error of V codes over the group's norm, including the error of 8 bits
OWNERS = 24  # few, so that owner numbers are reused several times in each trace


@dataclass(slots=True)
class ArrayTrace:
    """Operations of the array, and the state at each commit with the number of operations done by then.

    lost_keys: see `RandomHost.lost_keys`, of all commits.
    """

    operations: list[Operation]
    commits: list[tuple[int, State, U8]]
    lost_keys: int = 0


class _Host(RandomHost):
    """Records the state of each commit."""

    def __init__(self, seed: int) -> None:
        nand, self.trace = Nand(DRIVE.geometry), ArrayTrace([], [])
        nand.log = self.trace.operations.append
        super().__init__(seed, nand)
        self.kept: State = {}
        self.ftl.journal.log = self._commit

    def _commit(self, recorded: set[int], freed: set[int]) -> None:
        """Record the state before the current verb: a commit may happen in the middle of one."""
        before = self.kept
        self.kept = {handle: layers for handle, layers in before.items() if handle not in freed}
        self.kept |= {handle: self.model[handle].copy() for handle in recorded if handle in self.model}
        self.trace.lost_keys += self.lost_keys(before, self.kept)
        self.trace.commits.append((len(self.trace.operations), self.kept, self.blocks.copy()))


def record(seed: int, operations: int) -> ArrayTrace:
    """Run random verbs until the array has seen at least `operations` programs and erases."""
    host = _Host(seed)
    while len(host.trace.operations) < operations:
        host.step()
    return host.trace


def _apply(nand: Nand, operation: Operation) -> None:
    if isinstance(operation, Erase):
        pages = nand.pages_of(operation.block)
        nand.content[pages], nand.spare[pages] = 0, 0
        nand.erase_count[operation.block] += 1
        return
    nand.content[operation.ppn], nand.spare[operation.ppn] = operation.page, operation.spare


def _tear(nand: Nand, operation: Operation, generator: np.random.Generator) -> Callable[[], None]:
    """Leave an operation half done, in one of the possible variants; returns a function that undoes it."""
    pages = np.array([operation.ppn]) if isinstance(operation, Program) else nand.pages_of(operation.block)
    arrays: list[NDArray[Any]] = [nand.content, nand.spare]
    before = [array[pages].copy() for array in arrays]
    if isinstance(operation, Program):
        cut, spare = int(generator.integers(1, operation.page.size - 7)), generator.random()  # 1 byte may be corrected
        if spare < 0.5:  # the spare area may be complete although the data is not
            _apply(nand, operation)
        elif spare < 0.75:
            nand.spare[operation.ppn : operation.ppn + 1].view(np.uint8)[:] = generator.integers(0, 255, SPARE.itemsize)
        nand.content[operation.ppn, :cut] = operation.page[:cut]
        nand.content[operation.ppn, cut:] = generator.integers(0, 255, operation.page.size - cut)
    else:
        gone = pages[generator.random(pages.size) < 0.5]
        nand.content[gone], nand.spare[gone] = 0, 0

    def undo() -> None:
        for array, old in zip(arrays, before, strict=True):
            array[pages] = old

    return undo


def _judge(nand: Nand, expected: State, blocks: U8, newer: set[bytes] | None) -> tuple[int, int]:
    """Recover, and count lost and wrong sequences or logical pages.

    newer: further allowed contents of logical pages; None skips logical pages.
    """
    try:
        ftl = Ftl(DRIVE, nand)
    except FtlError:
        return len(expected), 0
    lost = wrong = 0
    for handle, stored in expected.items():
        seq = ftl.sequences.get(handle)
        if seq is None or seq.failed:
            lost += 1
            continue
        try:
            wrong += sum(not _right(ftl, handle, layer, *rows) for layer, rows in enumerate(stored.layers))
            wrong += stored.value is not None and not is_stored(ftl, handle, stored)
            wrong += seq.names != stored.names or not _found(ftl, handle, stored.names)
        except UncorrectableReadError:
            lost += 1
    wrong += len(set(ftl.sequences) - set(expected))
    if expected and newer is not None:
        for lpn in range(ftl.blocks.pages):
            content = ftl.blocks.read(np.array([lpn]), 0)[0][0].tobytes()
            wrong += content != blocks[lpn].tobytes() and content not in newer
    return lost, wrong


def _found(ftl: Ftl, handle: int, names: dict[bytes, int]) -> bool:
    """Whether exactly these keys map to this sequence."""
    keys = [(0, key) for key in KEYS] + [(VALUES, key) for key in VALUE_KEYS]
    return {key: named for label, key in keys for named in ftl.kv.names.find(label, [key]) if named[0] == handle} == {
        key: (handle, tokens) for key, tokens in names.items()
    }


def _right(ftl: Ftl, handle: int, layer: int, k: F16, v: F16) -> bool:
    """Whether a layer holds exactly these rows (S, H, d), in every representation."""
    if len(k) != ftl.sequences[handle].lengths[layer]:
        return False
    if not len(k):
        return True
    stored_k, stored_v, plan = ftl.read_back(handle, layer)
    if not (ftl.nand.intact(plan.ppns).all() and np.array_equal(stored_k, k) and np.array_equal(stored_v, v)):
        return False
    coarse = scores_agree(ftl, handle, layer) and values_agree(ftl, handle, layer)
    return coarse and np.array_equal(embedding_rows(ftl, handle, layer), k)


def embedding_rows(ftl: Ftl, handle: int, layer: int) -> F16:
    """K of a layer from its embedding-indexed copy, (S, H, d); K itself if the copy has no pages.

    For a quantized copy: NaN where its codes do not match K.
    """
    seq, rows = ftl.sequence(handle), ftl.read_back(handle, layer)[0].view(np.uint16)
    layout, view = seq.layout, _all_of(ftl, handle, layer)
    slots = view.e_slots.reshape(seq.heads, layout.embedding_pages, -1)
    for group in np.flatnonzero(slots[0, 0] != UNMAPPED).tolist():
        pages = [[view.banks[slot >> BANK_SHIFT][slot & 0x7FFFFFFF] for slot in head[:, group]] for head in slots]
        there = rows[group * layout.T : (group + 1) * layout.T]
        coded = seq.maps["embedding_k"]
        if isinstance(coded, PackedMap):
            codes = coded.pack(there)[:, 0]
            if not np.array_equal(np.concatenate(pages)[:, : codes.shape[1]], codes):
                there[:] = 0xFFFF
            continue
        by_token = np.array(pages).reshape(seq.heads, -1, layout.T).transpose(2, 0, 1)
        there[:] = by_token[: there.shape[0], :, : layout.head_dim]
    return rows.view(np.float16)


def _all_of(ftl: Ftl, handle: int, layer: int) -> KvSlotView:
    """View of a layer with all its pages resident."""
    view = ftl.view([handle], layer)
    ftl.store.page_in(np.concatenate([mapped.flash_slots() for mapped in ftl.sequence(handle).maps.values()]))
    return view


def scores_agree(ftl: Ftl, handle: int, layer: int) -> bool:
    """Whether all pages of quantized K, if the layout has them, match K within their quantization steps."""
    layout = ftl.sequence(handle).layout
    form = layout.progressive
    if form is None:
        return True
    stored = to_fp32(ftl.read_back(handle, layer)[0].view(np.uint16), form.bf16)
    view = _all_of(ftl, handle, layer)
    slots = view.maps["scores"][:, 0]
    for head, group in zip(*np.nonzero(in_flash(slots)), strict=True):
        rows = stored[group * form.T : (group + 1) * form.T, head]
        pages = view.banks[0][slots[head, group]][None].view(np.uint8)
        steps = to_fp32(pages[0, : 2 * form.m].view(np.uint16), form.bf16)
        steps = np.where(
            pages[0, 4 * form.m : 5 * form.m] > 0, steps, np.inf
        )  # a channel without digits has the middle value
        # K may have been rounded to 8 bits since, with the scale of a different, possibly longer group
        near = stored[max(0, group * form.T - layout.n) : (group + 1) * form.T + layout.n, head]
        allowed = 0.51 * steps + np.abs(near).max(0) / 60
        if (np.abs(decode_scores(pages, form)[0] - rows) > allowed * np.where(steps > 0, 1, np.inf)).any():
            return False
    return True


def values_agree(ftl: Ftl, handle: int, layer: int) -> bool:
    """Whether all pages of quantized V, if the layout has them, match V within the error of the codes."""
    form = ftl.sequence(handle).layout.progressive
    if form is None:
        return True
    stored = to_fp32(ftl.read_back(handle, layer)[1].view(np.uint16), form.bf16)
    view = _all_of(ftl, handle, layer)
    slots, per_group = view.maps["values"][:, 0], form.value_tokens
    for head, group in zip(*np.nonzero(in_flash(slots)), strict=True):
        rows = stored[group * per_group : (group + 1) * per_group, head]
        got = decode_values(view.banks[0][slots[head, group]][None].view(np.uint8), form)[0, : len(rows)]
        if np.linalg.norm(got - rows) > MISSED[form.v_bits] * np.linalg.norm(rows):
            return False
    return True


def bench_crash(cuts: int, seed: int, tick: Tick = no_tick, medium: Kind = "memory") -> dict[str, Any]:
    """Cut the power before, during and after every operation of a trace; `cuts` is the minimum number.

    Three traces with other seeds, four times as long, are cut at random moments: a tenth of that number in total. In a
    further twentieth, the machine that stores the drive's files loses power, with writes that were not synced.

    Args:
        cuts: Minimum number of power cuts.
        seed: Random seed of the traces.
        tick: Progress callback.
        medium: With a medium that reads files, the remains of each cut are stored in files and read by it; the machine
            then loses power a quarter as often, and only the writing process is killed as often.

    Returns:
        lost: Sequences and values of a commit that recovery did not find, and overwritten values for which a commit had
            neither the old nor the new one. wrong: Sequences, tokens, values or logical pages that differ from the last
            commit. recovered: Cuts with correct recovery.
    """
    operations, (of_host, of_process) = -(-cuts // 2), _deaths(cuts, medium)
    with patch("ftl.kv.owners.MAX_OWNERS", OWNERS), place(medium, DRIVE.geometry) as where:
        total = _sweep(where, seed, operations, 1.0, tick)
        every = total["cuts"]
        host = _host_cuts(where, seed, of_host, False, tick)
        kills = _host_cuts(where, seed + 1, of_process, True, tick)
        for longer in range(1, 4):
            total += _sweep(where, seed + 1000 * longer, 4 * operations, 0.1 / 12, tick)
    at_random, total = total["cuts"] - every, total + host + kills
    counts = {key: total[key] for key in ("cuts", "lost", "wrong", "recovered", "commits")}
    kinds = {"cuts_of_every_moment": every, "cuts_at_random": at_random, "cuts_of_the_host": host["cuts"]}
    kinds |= {"kills": kills["cuts"], "writes_lost": host["writes_lost"]}
    return {"medium": medium} | counts | kinds | {"seed": seed}


def _deaths(cuts: int, medium: Kind) -> tuple[int, int]:
    """Number of power losses of the host machine for `cuts` cuts, and number of kills of the writing process."""
    return (max(1, cuts // 20), 0) if medium == "memory" else (max(1, cuts // 4), max(1, cuts // 4))


def _sweep(where: Place, seed: int, operations: int, share: float, tick: Tick) -> Counter[str]:
    """Record a trace and cut it at this fraction of its moments."""
    trace, total = record(seed, operations), Counter[str]()
    generator = np.random.default_rng(seed)
    nand, commit = Nand(DRIVE.geometry), 0
    empty: tuple[State, U8] = ({}, np.zeros((LOGICAL_PAGES, DRIVE.geometry.page_bytes), np.uint8))
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
            with where.powered(nand, [torn.ppn] if isinstance(torn, Program) else []) as powered:
                missing, bad = _judge(powered, state, blocks, since)
            if undo:
                undo()
            total.update(cuts=1, lost=missing, wrong=bad, recovered=int(not (missing or bad)))
            tick(None)
        if number < len(trace.operations):
            _apply(nand, trace.operations[number])
    total["commits"] = len(trace.commits)
    total["lost"] += trace.lost_keys
    return total


class _Life(RandomHost):
    """One power-on to the next. commits: states allowed after recovery; a sync leaves only the last."""

    def __init__(self, seed: int, nand: Nand, state: State) -> None:
        super().__init__(seed, nand)
        self.model, self.commits = {handle: stored.copy() for handle, stored in state.items()}, [state]
        self.coming: list[State] = []
        self.ftl.journal.begins, self.ftl.journal.log = self._begin, self._commit

    def _begin(self, recorded: set[int], freed: set[int]) -> None:
        """Record the commit; power may be lost once it counts."""
        unfreed = {handle: layers for handle, layers in self.commits[-1].items() if handle not in freed}
        self.coming = [unfreed | {handle: self.model[handle].copy() for handle in recorded if handle in self.model}]

    def _commit(self, recorded: set[int], freed: set[int]) -> None:
        self.commits += self.coming
        self.coming = []

    def synced(self) -> None:
        """Keep only the last commit: it can no longer be lost."""
        del self.commits[:-1]


def _host_cuts(where: Place, seed: int, cuts: int, killed: bool, tick: Tick) -> Counter[str]:
    """Cut the power of the machine that stores a drive's files: writes after the last sync may be lost or torn.

    killed: kill only its process instead; its completed writes remain.
    """
    draw, state, total = random.Random(seed), State(), Counter[str]()
    with where.disk(draw) as disk:
        for number in range(cuts):
            disk.deaths = -1
            with where.life(disk) as nand:
                life = _Life(seed + number, nand, state)
                disk.synced, disk.deaths = life.synced, draw.randrange(1, 120)
                with suppress(Killed):
                    while True:
                        life.step()
            if killed:
                life.synced()
                disk.process_died()
            else:
                total["writes_lost"] += disk.lose_power()[0]
            life.commits += life.coming
            counts = list[tuple[int, int]]()
            for commit in life.commits:
                try:
                    with where.after(disk) as nand:
                        counts.append(_judge(nand, commit, life.blocks, None))
                except ValueError:  # the drive cannot be opened
                    counts.append((1 + len(commit), 0))
            best = min(range(len(counts)), key=lambda i: sum(counts[i]))
            (missing, bad), state = counts[best], life.commits[best]
            total.update(cuts=1, lost=missing, wrong=bad, recovered=int(not (missing or bad)))
            if missing or bad:
                break
            tick(None)
    return total
