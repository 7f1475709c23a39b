"""Runs many seeds of the simulation concurrently; a failing one is replayed and shortened."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import nullcontext
from enum import StrEnum
from typing import Annotated, Any

import typer

from vcsd.options import MAX_SEED
from vcsd.progress import Tick, no_tick, progress
from vcsd.tables import flat_table
from vcsd_eval import sweep
from vcsd_eval.experiment import Outcome
from vcsd_eval.verify.simulation.injected_bugs import PLANTS
from vcsd_eval.verify.simulation.world import FAULTS, STEPS, Verdict, simulate

SHOWN = 5  # failing seeds to shorten


class Plant(StrEnum):
    """A bug to plant."""

    NONE = "none"
    LOCK = "lock"
    CHAIN = "chain"
    GENERATION = "generation"
    OWNER = "owner"
    COMPLETION = "completion"
    NAMES = "names"
    FUSED = "fused"


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


def verdicts(seeds: range, steps: int, plant: str, workers: int, until: float) -> Iterator[Verdict]:
    """Verdicts in the order of completion; no seed starts after the time `until` (time.monotonic())."""
    with sweep.workers(workers) as pool:
        under_way = set[Future[Verdict]]()
        waiting = iter(seeds)
        while True:
            while len(under_way) < 2 * workers and time.monotonic() < until:
                if (seed := next(waiting, None)) is None:
                    break
                under_way.add(pool.submit(run, seed, steps, plant))
            if not under_way:
                return
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)


def bench_simulate(
    seeds: range, minutes: float, steps: int, plant: str = "none", workers: int = 2, tick: Tick = no_tick
) -> dict[str, Any]:
    """Run seeds for at most `minutes` minutes.

    Returns:
        lost: Sequences that a flush had acknowledged and that a drive lost on restart. wrong: Wrong answers, and
            sequences that match no commit after a restart. hangs: Runs without further progress.
    """
    total, faults, failing, ended = Counter[str](), Counter[str](dict.fromkeys(FAULTS, 0)), list[int](), 0
    for verdict in verdicts(seeds, steps, plant, workers, time.monotonic() + 60 * minutes):
        ended += 1
        total.update(steps=verdict.steps, lost=verdict.lost, wrong=verdict.wrong, hangs=verdict.hangs)
        faults.update(verdict.faults)
        if verdict.failed:
            failing.append(verdict.seed)
            if plant != "none":
                break
        tick(None)
    counts = {key: total[key] for key in ("steps", "lost", "wrong", "hangs")}
    shortened = [shrunk(seed, steps, plant) for seed in sorted(failing)[:SHOWN]]
    result = {
        "seeds": ended,
        "faults": sum(faults.values()),
        **counts,
        "by_kind": dict(faults),
        "failing": sorted(failing),
    }
    return result | {"shrunk": shortened, "plant": plant}


def experiment(
    seeds: Annotated[int, typer.Option(min=1, max=10_000_000, help="maximum number of runs")] = 1000,
    minutes: Annotated[
        float, typer.Option(min=0.01, max=100_000, help="time after which no run is started, minutes")
    ] = 8,
    first: Annotated[int, typer.Option("--first-seed", min=0, max=MAX_SEED, help="the first seed")] = 0,
    steps: Annotated[int, typer.Option(min=1, max=100_000, help="number of host operations per run")] = STEPS,
    plant: Annotated[
        Plant, typer.Option("--inject-bug", help="bug to inject; the run ends at the first seed that finds it")
    ] = Plant.NONE,
    workers: Annotated[int, typer.Option(min=1, max=256, help="processes")] = 2,
) -> Outcome:
    """Hosts, windows, firmware, FTL and disks in one thread with a virtual clock, under every fault that a seed draws.

    What failed is replayed by --first-seed SEED --seeds 1, and given with the fewest steps that show it.
    """
    with progress("seeds", seeds) as tick:
        result = bench_simulate(range(first, first + seeds), minutes, steps, plant.value, workers, tick)
    bad = bool(result["lost"] or result["wrong"] or result["hangs"])
    flat = {key: value for key, value in result.items() if isinstance(value, int)}
    shown: list[Any] = [flat_table("simulation", flat), flat_table("faults", result["by_kind"])]
    notes = [
        f"seed {failure['seed']}: {failure['what']} ({failure['steps']} steps; {', '.join(failure['faults'])})"
        for failure in result["shrunk"]
    ]
    return Outcome(result, shown, notes, failed=bad if plant is Plant.NONE else not bad)
