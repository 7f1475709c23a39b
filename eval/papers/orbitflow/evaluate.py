"""Our value for each of OrbitFlow's claims: its planner and its baselines, serving generated requests."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kv_cache.metrics import summary
from kv_cache.planner.problem import Offload, StepCosts, blocks_on_device, latency_s, offloaded_layers, strides
from kv_cache.policies import POLICIES, PolicyLike
from kv_cache.policies.orbitflow import OrbitFlow
from kv_cache.scheduler import Policy
from kv_cache.simulation import simulate
from kv_cache.trace import Request, Trace
from vcsd.progress import Tick, progress
from vcsd_eval.papers.claims import claims_of, printed
from vcsd_eval.papers.options import MachineOptions, Simulated
from vcsd_eval.papers.orbitflow.constants import ASSUMED, CALIBRATED, GAP, LATE, LOAD
from vcsd_eval.papers.paper import Evaluation, Paper
from vcsd_eval.papers.profiles import Model
from vcsd_eval.serving.machines import A5000, A6000

REQUESTS, LONGEST, SEEDS = 52, 12_000, (0, 1, 2)
HIGH = 5.0  # load at which systems differ
OTHERS = ("flexgen-half", "flexgen+", "slo-aware", "heuristic")
SYSTEMS: dict[str, PolicyLike] = {
    **{name: POLICIES[name] for name in ("deepspeed", *OTHERS)},
    "uniform": partial(OrbitFlow, uniform=True, pauses=False),
    "request-wise": partial(OrbitFlow, pauses=False),
    "pause": partial(OrbitFlow, late=LATE, deposits=False),
    "orbitflow": partial(OrbitFlow, late=LATE),
    "late = 0": partial(OrbitFlow, late=0),
    "late = 2": partial(OrbitFlow, late=2),
}
BY_LATE = ("late = 0", "late = 2")  # other values of alpha
MODEL_TOKENS = 32_384  # the model's length in the paper's code
PLANNER_SHARE = 0.0027  # of decode, the least of Table 1
RUNS = 29  # of each seed
RANGES = (("o10", "c", "d"), ("o11", "a", "b"), ("o12", "b", "c"))
Value = Callable[[dict[str, Any]], float]
Values = dict[str, float]
PRINTED = printed("orbitflow")


def generated(load: float, seed: int) -> Trace:
    """Requests as the code's generator makes them: lengths 96 to 144 times a power of two, lognormal gaps with CV 1."""
    generator = np.random.default_rng(seed)
    sigma, requests, at = math.sqrt(math.log(2)), list[Request](), 0.0
    while len(requests) < REQUESTS:
        given, made = (int(generator.integers(96, 145)) << int(generator.integers(0, 7)) for _ in range(2))
        if given + made > LONGEST:
            continue
        requests.append(Request(number=len(requests), arrival=round(at), input_tokens=given, output_tokens=made))
        at += generator.lognormal(math.log(GAP.value / load) - sigma * sigma / 2, sigma)
    return Trace(name=f"generated, {load}x", requests=requests, unit="steps")


class MedianRuns:
    """Summaries of runs, medians over seeds, each run when it is first asked for."""

    def __init__(self, tick: Tick) -> None:
        self.tick = tick
        self._made: dict[tuple[str, float, float], list[dict[str, Any]]] = {}

    def at(self, system: str, scale: float, value: Value, load: float = HIGH) -> float:
        """A value of a system at a scale of the objective."""
        key = system, scale, load
        if key not in self._made:
            self._made[key] = [self._run(*key, seed) for seed in SEEDS]
        return statistics.median(value(run) for run in self._made[key])

    def _run(self, system: str, scale: float, load: float, seed: int) -> dict[str, Any]:
        served = simulate(generated(load, seed), A5000, Policy.of(SYSTEMS[system]), A5000.slo_s(scale))
        self.tick(None)
        return summary(served) | {"calls": served.decided / REQUESTS}


def _tbt(run: dict[str, Any]) -> float:
    return float(run["tbt_slo_attainment_step"])


def _deposited(run: dict[str, Any]) -> float:
    return float(run["tbt_slo_attainment_buffered"])


def _tpot(run: dict[str, Any]) -> float:
    return float(run["tpot_slo_attainment_step"])


def _p95(run: dict[str, Any]) -> float:
    return float(run["step_s"]["p95"])


def _p99(run: dict[str, Any]) -> float:
    return float(run["step_s"]["p99"])


def _p99_tpot(run: dict[str, Any]) -> float:
    return float(run["step_tpot_s"]["p99"])


def _end_to_end(run: dict[str, Any]) -> float:
    return float(run["end_to_end_s"])


def _rate(run: dict[str, Any]) -> float:
    return float(run["requests_per_min"])


def _layouts() -> Values:
    """o1, o2, o4, o6: results of counting."""
    counts = len(strides(32)) - 1
    orders = math.log10(2.0**128 / counts**4)
    whole: Values = {
        "o1a": counts,
        "o1b": counts**4,
        "o1c": 2.0**128,
        "o1d": orders,
        "o2a": len(offloaded_layers(32, 32 // 4)),
    }
    whole["o2b"] = len(offloaded_layers(32, 32 // 5))
    for name, tokens in (("o4a", 2048), ("o4b", 16384)):
        costs = A6000.costs([tokens])
        whole[name] = float(costs.fetch[0] / costs.compute[0])
    return whole | {"o6a": 2 * 2**30 / Model.load("llama-3-8b").shape.kv_bytes_per_token / 1024}


def _printed() -> Values:
    """Values of the paper and its code that are inconsistent with other printed ones."""
    arrivals = 60 * LOAD.value / (GAP.value * A5000.slo_s(1.0))  # requests/min, of steps at the objective
    shares = [PRINTED[f"o22{letter}"] for letter in "abc"]
    rows = {f"o22{letter}": 100 * share / sum(shares) for letter, share in zip("abc", shares, strict=True)}
    planner = PLANNER_SHARE * PRINTED["o21c"]
    return rows | {"o7a": MODEL_TOKENS / 1000, "o9a": PRINTED["o9c"], "o21e": planner, "o23a": arrivals}


def _figure3() -> Values:
    """o3: nine layers, three blocks a layer's time, two requests."""
    values: Values = {}
    placements = {"A": (3, 3), "B": (0, 3), "C": (2, 3)}
    for blocks, names in (((3, 6), {"A": "o3a", "B": "o3b", "C": "o3c"}), ((4, 6), {"A": "o3d", "C": "o3e"})):
        costs = StepCosts(compute=np.ones(9), fetch=np.array(blocks) / 3, blocks=np.array(blocks), room=70)
        for placement, name in names.items():
            values[name] = 3 * latency_s(costs, [Offload(count) for count in placements[placement]])
        values["o3f"] = blocks_on_device(costs, [Offload(count) for count in placements["B"]])
    return values


def _served(runs: MedianRuns, policy: str) -> Values:
    """o8 to o13, o19: results of runs. mine: the paper's own system."""

    def less(value: Value, than: str, scale: float) -> float:
        return 100 * (1 - runs.at(policy, scale, value) / runs.at(than, scale, value))

    def more(value: Value, than: str) -> float:
        return 100 * (runs.at(policy, 1.5, value) / runs.at(than, 1.5, value) - 1)

    tails = [less(value, other, 1.5) for value in (_p99, _p99_tpot) for other in OTHERS]
    ends, rates = ([more(value, other) for other in OTHERS] for value in (_end_to_end, _rate))
    return {
        "o8a": 100 * (runs.at(policy, 1.5, _tpot) - runs.at("deepspeed", 1.5, _tpot)),
        "o8b": 100 * (runs.at(policy, 1.5, _deposited) - runs.at("deepspeed", 1.5, _tbt)),
        "o9b": less(_p95, "flexgen-half", 1.0),
        "o9c": less(_p95, "deepspeed", 1.0),
        "o10a": less(_p99, "deepspeed", 1.5),
        "o10b": less(_p99_tpot, "deepspeed", 1.5),
        "o10c": min(tails),
        "o10d": max(tails),
        "o11a": min(ends),
        "o11b": max(ends),
        "o12a": runs.at(policy, 1.5, _rate) / runs.at("deepspeed", 1.5, _rate),
        "o12b": min(rates),
        "o12c": max(rates),
        "o13a": 100 * runs.at(policy, 1.0, _deposited),
        "o13b": statistics.mean(100 * runs.at(other, 2.5, _tbt) for other in OTHERS),
        "o19c": runs.at(policy, 1.5, lambda run: run["calls"]),
    }


def _studied(runs: MedianRuns, policy: str) -> Values:
    """o17, o18: gain of each part, and of the deposit added to other systems."""

    def attained(system: str, scale: float = 1.0, value: Value = _tbt) -> float:
        return 100 * runs.at(system, scale, value, LOAD.value)

    def gained(system: str, scale: float) -> float:
        return attained(system, scale, _deposited) - attained(system, scale)

    return {
        "o17a": attained("uniform"),
        "o17b": attained("request-wise"),
        "o17c": attained("pause"),
        "o17d": attained(policy, value=_deposited),
        "o18a": gained("flexgen+", 2.5),
        "o18b": gained("heuristic", 2.5),
        "o18c": gained(policy, 2.5),
        "o18d": gained("heuristic", 1.0),
        "o18e": gained(policy, 1.0),
    }


def evaluate(machine: MachineOptions, simulated: Simulated, with_figures: bool) -> Evaluation:
    """Count what can be counted, and serve the same requests by all systems at scales of the objective."""
    with progress("runs", RUNS * len(SEEDS)) as tick:
        runs = MedianRuns(tick)
        served = {name: _served(runs, name) | _studied(runs, name) for name in ("orbitflow", *BY_LATE)}
    ours = _layouts() | _printed() | _figure3() | served["orbitflow"]
    columns = {name: served[name] for name in BY_LATE}
    ranges = {name: [ours[f"{name}{low}"], ours[f"{name}{high}"]] for name, low, high in RANGES}
    notes = [
        f"{name}: {ours[name + low]:.1f} to {ours[name + high]:.1f} %, "
        f"beside {PRINTED[name + low]:g} to {PRINTED[name + high]:g} % in print"
        for name, low, high in RANGES
    ]
    return Evaluation(values=ours, columns=columns, more={"ranges_percent": ranges}, notes=notes)


PAPER = Paper(
    name="orbitflow",
    title="OrbitFlow",
    claims=claims_of("orbitflow"),
    calibrated=CALIBRATED,
    assumed=ASSUMED,
    evaluate=evaluate,
)
