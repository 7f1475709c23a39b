"""Cost of choosing a placement: OrbitFlow's integer program, an exact search, and a heuristic search.

Instances are batches of random requests at random progress, on a device that can hold part of their KV cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import typer

from kv_cache.planner.ilp import SolverMissingError, solve
from kv_cache.planner.local_search import local_search
from kv_cache.planner.problem import BLOCK_TOKENS, Offload, PlacementProblem, PlacementResult, spread, strides
from vcsd.progress import Tick, no_tick, progress
from vcsd.tables import table
from vcsd_eval.experiment import Outcome
from vcsd_eval.serving.machines import A5000

SIZES = ((32, 4), (32, 8), (40, 16), (80, 8))  # layers, requests
SEARCHED = (40, 8)  # largest instance of the search: larger ones can take minutes
ROOM = (0.4, 1.1)  # fractions of the batch's KV cache that the device can hold
SAME_S = 1e-9
LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class PlannerLoad:
    """Number of instances."""

    instances: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="instances compared with all placements, up to 4 requests")
    ] = 1000
    timed: Annotated[int, typer.Option("--timed-instances", min=1, max=100_000, help="timed instances per size")] = 20
    gap: Annotated[
        float,
        typer.Option(
            "--mip-gap", min=0, max=1, help="relative gap at which the program stops for more than 4 requests"
        ),
    ] = 0.01
    seed: Annotated[int, typer.Option(min=0, max=1 << 31, help="random seed of the instances")] = 0


def instance(generator: np.random.Generator, layers: int, requests: int) -> PlacementProblem:
    """A batch: lengths are 96 to 144 times a power of two, as in OrbitFlow's generator; part of the output is
    generated.
    """
    lengths = [int(generator.integers(96, 145)) << int(generator.integers(0, 7)) for _ in range(2 * requests)]
    tokens = [given + int(generator.random() * made) for given, made in zip(lengths[::2], lengths[1::2], strict=True)]
    blocks = sum(-(-each // BLOCK_TOKENS) for each in tokens)
    compute = replace(A5000.compute, layers=layers)
    cost = replace(A5000, compute=compute, room_blocks=max(1, int(blocks * generator.uniform(*ROOM))))
    return PlacementProblem(cost.costs(tokens), [[Offload(count) for count in strides(layers)]] * requests)


def exhaustive(problem: PlacementProblem) -> float | None:
    """Shortest step of all placements that fit; None if no placement fits."""
    R, options = problem.held.shape
    every = np.stack(np.meshgrid(*[np.arange(options)] * R, indexing="ij"), axis=-1).reshape(-1, R)
    fit = every[problem.held[np.arange(R), every].sum(axis=1) <= problem.costs.room]
    return float(problem.latencies_s(fit).min()) if len(fit) else None


def bench_plan(load: PlannerLoad, tick: Tick = no_tick) -> dict[str, Any]:
    """CPU milliseconds of each planner by size; whether its plan was optimal, and never infeasible if one fits.

    Columns:
        ilp: Integer program, solved to optimality for at most 4 requests, else to `gap`.
        search: Exact depth-first search with bounds.
        descent: Local search; no change of two requests improves the result.
        near: The same with a bounded effort.
        spread: Gain if any number of layers may be away instead of every N-th only, over 100 instances of 32 x 3.
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
        "false_infeasible": infeasible,
        "sizes": sizes,
        "median_ms_32x4": sizes["32x4"]["ilp"]["median_ms"],
        "spread": _spread(generator),
    }


def _timed(load: PlannerLoad, generator: np.random.Generator, layers: int, requests: int, tick: Tick) -> dict[str, Any]:
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
    """Gain of an arbitrary number of layers over every N-th layer."""
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


def experiment(load: PlannerLoad) -> Outcome:
    """OrbitFlow-style placements: the integer program compared with searches, in time and in quality."""
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
        f"{result['wrong']} of {load.instances} plans are not the best, {result['false_infeasible']} were missed",
        f"with any count of layers away {more['better_share']:.0%} are better, median {more['median_faster']:.1%}",
    ]
    failed = bool(result["wrong"] or result["false_infeasible"])
    return Outcome(result, [table("Plans", columns, rows, left=("way",))], lines, failed)
