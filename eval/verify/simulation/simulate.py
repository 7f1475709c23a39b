"""Runs many seeds of the simulation concurrently; a failing one is replayed and shortened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import nullcontext
from typing import Any

from vcsd.progress import Tick, no_tick
from vcsd_eval import sweep
from vcsd_eval.verify.simulation.injected_bugs import PLANTS
from vcsd_eval.verify.simulation.world import FAULTS, STEPS, Verdict, simulate

SHOWN = 5  # failing seeds to shorten


def run(seed: int, steps: int, plant: str, allowed: frozenset[str] = frozenset(FAULTS)) -> Verdict:
    """One seed, with a bug planted or none."""
    with PLANTS[plant]() if plant in PLANTS else nullcontext():
        return simulate(seed, steps, allowed)


def shrunk(seed: int, steps: int, plant: str) -> dict[str, Any]:
    """Smallest number of steps and kinds of faults with which a failing seed still fails."""
    verdict = run(seed, steps, plant)
    steps = verdict.steps
    low = 1
    while low < steps:
        middle = (low + steps) // 2
        if run(seed, middle, plant).failed:
            steps = middle
        else:
            low = middle + 1
    allowed = frozenset(FAULTS)
    for fault in FAULTS:
        if run(seed, steps, plant, allowed - {fault}).failed:
            allowed -= {fault}
    verdict = run(seed, steps, plant, allowed)
    hit = sorted(fault for fault in allowed if verdict.faults[fault])
    return {"seed": seed, "steps": steps, "faults": hit, "what": verdict.what}


def verdicts(seeds: range, steps: int, plant: str, workers: int) -> Iterator[Verdict]:
    """Verdicts in the order of completion."""
    with sweep.workers(workers) as pool:
        under_way = set[Future[Verdict]]()
        waiting = iter(seeds)
        while True:
            while len(under_way) < 2 * workers:
                if (seed := next(waiting, None)) is None:
                    break
                under_way.add(pool.submit(run, seed, steps, plant))
            if not under_way:
                return
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)


def bench_simulate(
    count: int, seed: int, tick: Tick = no_tick, workers: int = 2, inject_bug: str = "none", steps: int = STEPS
) -> dict[str, Any]:
    """Run `count` seeds from `seed` on; with an injected bug until one finds it.

    Returns:
        lost: Sequences that a flush had acknowledged and that a drive lost on restart. wrong: Wrong answers, and
            sequences that match no commit after a restart. hangs: Runs without further progress.
    """
    total, faults, failing, ended = Counter[str](), Counter[str](dict.fromkeys(FAULTS, 0)), list[int](), 0
    for verdict in verdicts(range(seed, seed + count), steps, inject_bug, workers):
        ended += 1
        total.update(steps=verdict.steps, lost=verdict.lost, wrong=verdict.wrong, hangs=verdict.hangs)
        faults.update(verdict.faults)
        if verdict.failed:
            failing.append(verdict.seed)
            if inject_bug != "none":
                break
        tick(None)
    counts = {key: total[key] for key in ("steps", "lost", "wrong", "hangs")}
    shortened = [shrunk(seed, steps, inject_bug) for seed in sorted(failing)[:SHOWN]]
    result = {
        "seeds": ended,
        "faults": sum(faults.values()),
        **counts,
        "by_kind": dict(faults),
        "failing": sorted(failing),
    }
    return result | {"shrunk": shortened, "injected_bug": inject_bug}
