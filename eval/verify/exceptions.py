"""Exceptions in the middle of verbs: one at each line and at each call that may allocate, then power-on."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from csd_io.medium import KINDS
from csd_spec import LAYOUTS, Flush, GetLog, KvCrop, KvRead, LogPage, SeqCreate, Status
from ftl import FtlError
from vcsd.progress import Tick, no_tick
from vcsd_eval.sweep import sweep
from vcsd_eval.verify.injector import ROOT, Event, InjectedInterrupt, Injector
from vcsd_eval.verify.interrupted import CASES, LAYERS, InterruptedDrives, Observed, PowerCycle, observe
from vcsd_eval.verify.random_host import DIM


@dataclass(frozen=True, slots=True)
class AllowedContents:
    """Allowed contents of a drive after an interrupted verb: each sequence and logical page is as its last flush left
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
    def of(cls, bench: InterruptedDrives, name: str) -> AllowedContents:
        """Run the verb without an interruption."""
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

    def judge(self, observed: Observed) -> tuple[int, int]:
        """Count flushed sequences that are lost, and sequences, names and logical pages that are wrong."""
        states = self.flushed, self.before, self.after, self.settled
        lost = len((self.flushed.seqs.keys() & self.after.seqs.keys()) - observed.seqs.keys())
        wrong = sum(
            page not in allowed for page, *allowed in zip(observed.pages, *(s.pages for s in states), strict=True)
        )
        for handle, (rows, names) in observed.seqs.items():
            contents = [state.seqs[handle] for state in states if handle in state.seqs]
            allowed_rows, allowed_names = [rows for rows, _ in contents], frozenset().union(*(n for _, n in contents))
            wrong += rows not in allowed_rows or not names <= allowed_names
        return lost, wrong


def judge(bench: InterruptedDrives, name: str, expected: AllowedContents, injector: Injector) -> tuple[str, int, int]:
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
    except (Exception, InjectedInterrupt):  # noqa: BLE001 - whatever was injected
        outcome = "raised"
    try:
        if life.firmware.ftl.nand.failed:
            wrong = _misuse(life, name, expected)
            lost, others = expected.judge(bench.power_on(life))
            return "failed", lost, wrong + others
        observed = observe(life)
        whole = outcome == "completed" or (outcome == "raised" and observed == expected.after)
        wanted = expected.after if whole else expected.undone if observed == expected.undone else expected.before
        wrong = int(observed != wanted)
        life.namespace.flush()
        wrong += life.do(Flush()).status is not Status.SUCCESS
        observed = bench.power_on(life)
        lost = len(wanted.seqs.keys() - observed.seqs.keys())
        return outcome, lost, wrong + (observed != wanted)
    except FtlError:  # something that was stored cannot be read
        return "unreadable", 1, 0


# Verbs that leave the rows of sequences as they are: a failed drive goes on reading all of them
READABLE = {"create", "read", "gather", "name", "exist", "drop", "list", "log", "flush"}
READABLE |= {"block write", "large block write", "block discard", "block flush"}


def _misuse(life: PowerCycle, name: str, expected: AllowedContents) -> int:
    """Use a failed drive. Counts what is wrong: changes that it carries out, rows that are not those before the verb or
    after it, and rows that it refuses though the verb did not change them."""
    nand = life.firmware.ftl.nand
    before = nand.writes, int(nand.erase_count.sum())
    wrong = int(life.do(GetLog(LogPage.SMART)).status is not Status.SUCCESS)
    for command in (Flush(), SeqCreate(1, 1, 1, DIM, 16), life.append(life.seqs[:1], 0, 30)):
        wrong += life.do(command).status is Status.SUCCESS
    for handle in life.seqs:
        done = [life.do(KvRead((handle,), layer)) for layer in range(LAYERS)]
        if all(completion.status is Status.SUCCESS for completion in done):
            rows = tuple(array.tobytes() for completion in done for array in completion.data)
            states = expected.before, expected.after
            wrong += rows not in [state.seqs[handle][0] for state in states if handle in state.seqs]
        else:
            wrong += name in READABLE
    return wrong + ((nand.writes, int(nand.erase_count.sum())) != before)


def events(bench: InterruptedDrives, name: str) -> Iterator[tuple[Event, int, tuple[str, int]]]:
    """Each event of a verb: its kind, number, and source line."""
    for kind in ("line", "allocation"):
        life = bench.life()
        with Injector(kind) as injector:
            CASES[name](life)
        life.close()
        yield from ((kind, number, place) for number, place in enumerate(injector.seen))


@dataclass(frozen=True, slots=True)
class InterruptedVerb:
    """One verb, in all layouts on all media."""

    name: str
    points: int
    seed: int


def work(task: InterruptedVerb, tick: Tick) -> tuple[Counter[str], list[str], set[tuple[str, int]]]:
    """Interrupt a verb at `points` events, of every layout and medium as many: first at lines that were not met yet.

    Returns:
        Counts, findings, and the source lines that were interrupted.
    """
    total, findings, covered = Counter[str](), list[str](), set[tuple[str, int]]()
    draw = random.Random(f"{task.name} {task.seed}")
    pairs = [(layout, medium) for layout in LAYOUTS for medium in KINDS]
    shares = dict(zip(pairs, parts(task.points, len(pairs)), strict=True))
    for layout in LAYOUTS:
        media = [medium for medium in KINDS if shares[layout, medium]]
        if not media:
            continue
        with tempfile.TemporaryDirectory(prefix="vcsd-") as scratch:
            benches = {medium: InterruptedDrives(layout, medium, Path(scratch) / medium) for medium in media}
            expected = AllowedContents.of(benches[media[0]], task.name)
            every = list(events(benches[media[0]], task.name))
            for medium, bench in benches.items():
                draw.shuffle(every)
                every.sort(key=lambda event: event[2] in covered)  # stable: others in random order
                left = shares[layout, medium]
                for kind, at, place in every:
                    if not left:
                        break
                    injector = Injector(kind, at)
                    outcome, lost, wrong = judge(bench, task.name, expected, injector)
                    if not injector.has_raised:  # this medium has fewer events
                        continue
                    left -= 1
                    covered.add(place)
                    total.update({"points": 1, outcome: 1, kind: 1, "lost": lost, "wrong": wrong})
                    if lost or wrong:
                        where = f"{Path(place[0]).relative_to(ROOT)}:{place[1]}"
                        findings.append(f"{task.name}, {medium}, layout {layout}: {kind} {at} near {where}: {outcome}")
                    tick(None)
    return total, findings, covered


def parts(whole: int, count: int) -> list[int]:
    """A number cut into `count` nearly equal ones."""
    return [whole * (number + 1) // count - whole * number // count for number in range(count)]


def bench_exceptions(points: int, seed: int, workers: int, tick: Tick = no_tick) -> dict[str, Any]:
    """Interrupt every verb on every medium in every layout, at `points` events in all."""
    tasks = [InterruptedVerb(name, share, seed) for name, share in zip(CASES, parts(points, len(CASES)), strict=True)]
    results = sweep(work, tasks, workers, tick)
    total = sum((counts for counts, _, _ in results), Counter[str]())
    keys = "points", "lost", "wrong", "failed", "refused", "completed", "raised", "unreadable", "line", "allocation"
    return {key: total[key] for key in keys} | {
        "lines": len(set().union(*(covered for _, _, covered in results))),
        "verbs": len(CASES),
        "layouts": len(LAYOUTS),
        "media": len(KINDS),
        "seed": seed,
        "found": [each for _, result, _ in results for each in result],
    }
