"""What it costs to choose a placement: OrbitFlow's integer program beside a search that is exact, and one that is not.

Instances are batches at random points of random requests, on a device that has room for a part of their K and V.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import typer

from eval.experiment import Outcome
from eval.serving.machines import A5000
from kv_cache.planner.ilp import SolverMissingError, solve
from kv_cache.planner.local_search import local_search
from kv_cache.planner.problem import BLOCK_TOKENS, Offload, PlacementProblem, PlacementResult, spread, strides
from vcsd.progress import Tick, no_tick, progress
from vcsd.tables import table

SIZES = ((32, 4), (32, 8), (40, 16), (80, 8))  # layers, requests
SEARCHED = (40, 8)  # layers and requests up to which the search is asked: beyond it takes minutes at times
ROOM = (0.4, 1.1)  # of the batch's K and V that the device holds
SAME_S = 1e-9
LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Load:
    """How many plans."""

    instances: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="compared with all placements, up to 4 requests")
    ] = 1000
    timed: Annotated[int, typer.Option("--timed-instances", min=1, max=100_000, help="of each size, timed")] = 20
    gap: Annotated[
        float, typer.Option("--mip-gap", min=0, max=1, help="at which the program may stop for more than 4 requests")
    ] = 0.01
    seed: Annotated[int, typer.Option(min=0, max=1 << 31, help="of the instances")] = 0


def instance(generator: np.random.Generator, layers: int, requests: int) -> PlacementProblem:
    """A batch: lengths 96 to 144 times a power of two, as OrbitFlow's generator has them, part of the output made."""
    lengths = [int(generator.integers(96, 145)) << int(generator.integers(0, 7)) for _ in range(2 * requests)]
    tokens = [given + int(generator.random() * made) for given, made in zip(lengths[::2], lengths[1::2], strict=True)]
    blocks = sum(-(-each // BLOCK_TOKENS) for each in tokens)
    compute = replace(A5000.compute, layers=layers)
    cost = replace(A5000, compute=compute, room_blocks=max(1, int(blocks * generator.uniform(*ROOM))))
    return PlacementProblem(cost.costs(tokens), [[Offload(count) for count in strides(layers)]] * requests)


def exhaustive(problem: PlacementProblem) -> float | None:
    """The shortest step of all placements that fit; None where none does."""
    R, options = problem.held.shape
    every = np.stack(np.meshgrid(*[np.arange(options)] * R, indexing="ij"), axis=-1).reshape(-1, R)
    fit = every[problem.held[np.arange(R), every].sum(axis=1) <= problem.costs.room]
    return float(problem.latencies_s(fit).min()) if len(fit) else None


def bench_plan(load: Load, tick: Tick = no_tick) -> dict[str, Any]:
    """CPU milliseconds of each way to plan, by size; whether it was the best, never infeasible where something fits.

    ilp: to the end where there are at most 4 requests, else to `gap`. search: depth-first with bounds, exact. descent:
    no change of two requests makes it better. near: the same within a bounded effort. spread: where any count of layers
    may lie away, not only every N-th, over 100 instances of 32 x 3.
    """
    generator = np.random.default_rng(load.seed)
    wrong = infeasible = 0
    for number in range(load.instances):
        problem = instance(generator, 32, 1 + number % 4)
        best = exhaustive(problem)
        for found in (solve(problem), problem.optimum()):
            infeasible += found is None and best is not None
            wrong += best is not None and found is not None and abs(found.latency_s - best) > SAME_S
        tick(None)
    sizes = {}
    for layers, requests in SIZES:
        sizes[f"{layers}x{requests}"] = _timed(load, generator, layers, requests, tick)
    return {
        "instances": load.instances,
        "wrong": wrong,
        "infeasible_wrongly": infeasible,
        "sizes": sizes,
        "median_ms_32x4": sizes["32x4"]["ilp"]["median_ms"],
        "spread": _spread(generator),
    }


def _timed(load: Load, generator: np.random.Generator, layers: int, requests: int, tick: Tick) -> dict[str, Any]:
    ways: dict[str, Callable[[PlacementProblem], PlacementResult | None]] = {
        "ilp": lambda problem: solve(problem, load.gap if requests > 4 else 0.0, LIMIT_S),
        "descent": _descent,
        "near": local_search,
    }
    if layers <= SEARCHED[0] and requests <= SEARCHED[1]:
        ways["search"] = PlacementProblem.optimum
    taken: dict[str, list[float]] = {name: [] for name in ways}
    longer: dict[str, list[float]] = {name: [] for name in ways}
    fits = 0
    for _ in range(load.timed):
        problem, found = instance(generator, layers, requests), dict[str, PlacementResult | None]()
        for name, way in ways.items():
            began = time.process_time()
            found[name] = way(problem)
            taken[name].append(1e3 * (time.process_time() - began))
        steps = {name: each.latency_s for name, each in found.items() if each}
        fits += bool(steps)
        for name, step in steps.items():
            longer[name].append(step / min(steps.values()) - 1)
        tick(None)
    return {
        name: {
            "median_ms": statistics.median(taken[name]),
            "max_ms": max(taken[name]),
            "longer_mean": statistics.fmean(longer[name] or [0.0]),
            "longer_worst": max(longer[name], default=0.0),
        }
        for name in ways
    } | {"feasible": fits}


def _descent(problem: PlacementProblem) -> PlacementResult | None:
    good = problem.local_optimum()
    return problem.placement(good) if good else None


def _spread(generator: np.random.Generator) -> dict[str, float]:
    """What any count of layers gives over every N-th."""
    better, faster, more = 0, list[float](), 0
    for _ in range(100):
        few = instance(generator, 32, 3)
        many = PlacementProblem(few.costs, [[Offload(count) for count in spread(32)]] * 3)
        best, free = few.optimum(), many.optimum()
        if free and best:
            faster.append(best.latency_s / free.latency_s - 1)
            better += faster[-1] > SAME_S
        more += best is None and free is not None
    return {"better_share": better / len(faster), "median_faster": statistics.median(faster), "feasible_more": more}


def experiment(load: Load) -> Outcome:
    """Placements of OrbitFlow's kind: the integer program beside searches, in time and in what they find."""
    with progress("plans", load.instances + len(SIZES) * load.timed) as tick:
        try:
            result = bench_plan(load, tick)
        except SolverMissingError as error:
            raise ValueError(str(error)) from error
    columns = ("layers x requests", "way", "median CPU ms", "max CPU ms", "step longer, mean", "worst")
    rows = [
        (
            *(size, name, f"{way['median_ms']:.2f}", f"{way['max_ms']:.1f}"),
            *(f"{way['longer_mean']:.2%}", f"{way['longer_worst']:.2%}"),
        )
        for size, ways in result["sizes"].items()
        for name, way in ways.items()
        if name != "feasible"
    ]
    more = result["spread"]
    lines = [
        f"{result['wrong']} of {load.instances} plans are not the best, {result['infeasible_wrongly']} were missed",
        f"with any count of layers away {more['better_share']:.0%} are better, median {more['median_faster']:.1%}",
    ]
    failed = bool(result["wrong"] or result["infeasible_wrongly"])
    return Outcome(result, [table("Plans", columns, rows, left=("way",))], lines, failed)
