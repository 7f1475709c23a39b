"""Our value for each of TierKV's claims.

Rows without a window come from the engine. With a window, the printed values count the link several times, which no
engine does: they come from a closed-form reading. The engine's value, whose link carries each byte once, is given in
addition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, median
from typing import Any

import numpy as np

from vcsd_eval.papers.claims import ClaimKind, claims_of
from vcsd_eval.papers.options import MachineOptions, Simulated
from vcsd_eval.papers.paper import Evaluation, Paper
from vcsd_eval.papers.profiles import Gpu, Host, Model, Ssd
from vcsd_eval.papers.tierkv.blocks import best_tokens, block_bytes, efficiency, from_dram_us, from_ssd_us, lost_share
from vcsd_eval.papers.tierkv.constants import (
    ASSUMED,
    CALIBRATED,
    COMPUTE,
    COPIES,
    MEAN_TOKENS,
    PRINTED,
    SPREAD,
    STALL_SHARE,
    STEP_TOKENS,
    SWEEP_COPIES,
    UNIFORM,
    WINDOW,
)
from vcsd_eval.papers.tierkv.reading import Reading
from vcsd_eval.papers.tierkv.workload import MeanIteration, served

Values = dict[str, float]
MODELS_7B_UP = ("llama-3-8b", "llama-2-13b", "codellama-34b", "llama-3-70b")
WINDOWS = sorted(int(name.removeprefix("t14-")) for name in PRINTED if name.startswith("t14-"))
BLOCK_SIZES = (4, 8, 16, 32, 64)
RATIO, BURST = 3, 2  # oversubscription, and by how much a burst multiplies the rate
LETTERS = "abcd"
K = int(WINDOW.value)
SWEEP = Reading(COMPUTE.value, SWEEP_COPIES.value, SPREAD.value)


def reading(ratio: float) -> Reading:
    """Reading at an oversubscription ratio: table 5, interpolated linearly between rows, proportional beyond."""
    most = max(COPIES)
    between = np.interp(ratio, [1, *COPIES], [0.0, *(copy.value for copy in COPIES.values())])
    copies = COPIES[most].value * (ratio - 1) / (most - 1) if ratio > most else float(between)
    return Reading(COMPUTE.value, copies, SPREAD.value)


def tokens_per_s(tpot_ms: float, compute_ms: float = COMPUTE.value) -> float:
    """Throughput, tokens/s; only a fraction of a stall affects it."""
    return 1e3 * STEP_TOKENS.value / (compute_ms + STALL_SHARE.value * (tpot_ms - compute_ms))


def _blocks(models: list[Model], gpu: Gpu, host: Host, ssd: Ssd) -> Values:
    """t1 to t3, t23, t24: bytes and how long they take."""
    first = models[0]
    small, usual = (efficiency(host, block_bytes(first, tokens)) for tokens in (4, 16))
    return {
        **{f"t1{letter}": block_bytes(model) / 2**20 for letter, model in zip(LETTERS, models, strict=True)},
        "t2a": from_dram_us(host, 2e6),
        "t2b": from_ssd_us(ssd, 2e6),
        "t2c": from_dram_us(host, 8e6),
        "t2d": from_ssd_us(ssd, 8e6),
        "t2e": gpu.memory_gb_per_s / ssd.read_gb_per_s,
        "t3a": from_dram_us(host, 8e6) / 1e3,
        "t3b": PRINTED["t4b"] / (from_dram_us(host, 8e6) / 1e3),
        "t23": 100 * (small / usual - 1),
        "t24a": 100 * lost_share(64, MEAN_TOKENS.value),
        "t24b": best_tokens(first, host, MEAN_TOKENS.value, BLOCK_SIZES),
        "t24c": best_tokens(first, host, UNIFORM.value, BLOCK_SIZES),
        "t5-weights": first.weight_bytes / (gpu.memory_gb_per_s * 1e6),
        "t5-iteration": PRINTED["t4a"],
    }


@dataclass(frozen=True, slots=True)
class ReadingModel:
    """Method to compute an iteration's milliseconds and hit fraction for a reading and a window."""

    tpot_ms: Callable[[Reading, int], float]
    hits: Callable[[Reading, int], float]


@cache
def _engine(at: Reading, window: int) -> MeanIteration:
    """By events: all draws without a window, every fourth with one."""
    return served(at.compute_ms, at.copies_ms[2::4] if window else at.copies_ms, window)


ENGINE = ReadingModel(lambda at, window: _engine(at, window).tpot_ms, lambda at, window: _engine(at, window).hits)
CONSERVED = ReadingModel(Reading.conserved_tpot_ms, Reading.conserved_hits)
PRINTED_BUS = ReadingModel(
    lambda at, window: at.tpot_ms(window) if window else ENGINE.tpot_ms(at, 0),
    lambda at, window: at.hits(window) if window else ENGINE.hits(at, 0),
)


def _sweeps(link: ReadingModel) -> Values:
    """t5 to t14, t16, t17: TPOT, tokens/s and hits over oversubscription and window."""
    values = {"t5-oracle": link.tpot_ms(reading(1), 0), "t9": tokens_per_s(link.tpot_ms(reading(1), 0))}
    for ratio in COPIES:
        reactive, prefetched = (link.tpot_ms(reading(ratio), window) for window in (0, K))
        values |= {f"t6-{ratio}": reactive, f"t7-{ratio}": reactive}
        values |= {f"t10-{ratio}": tokens_per_s(reactive), f"t11-{ratio}": tokens_per_s(reactive)}
        values[f"t5-{ratio}" if ratio <= RATIO else f"t8-{ratio}"] = prefetched
        values[f"t12-{ratio}"] = tokens_per_s(prefetched)
    for window in WINDOWS:
        values |= {f"t13-{window}": 100 * link.hits(SWEEP, window), f"t14-{window}": link.tpot_ms(SWEEP, window)}
    values["t16a"] = values["t6-3"] / values["t5-3"]
    values["t16b"] = values["t12-3"] / values["t10-3"]
    values["t17"] = values["t6-5"] / values["t8-5"]
    values |= {"t22b": 100 * link.hits(reading(RATIO), K), "t22c": 100 * link.hits(reading(RATIO * BURST), K)}
    values |= {"t25a": 100 * link.hits(reading(RATIO), K), "t25d": values["t14-0"], "t25e": values["t14-0"]}
    return {name: value for name, value in values.items() if name in PRINTED}


def _models(models: list[Model], link: ReadingModel) -> Values:
    """t19: computing grows with the parameters and copies with a block's bytes, from the smallest model's."""
    values = {}
    first, base = models[0], reading(RATIO)
    for letter, model in zip(LETTERS, models, strict=True):
        computing = base.compute_ms * model.parameters_billion / first.parameters_billion
        copies = base.mean_ms * block_bytes(model) / block_bytes(first)
        at = Reading(computing, copies, base.spread)
        values[f"t19{letter}"] = tokens_per_s(link.tpot_ms(at, K), computing) / tokens_per_s(at.tpot_ms(0), computing)
    return values


def _requests() -> Values:
    """t21, t25: single requests, and t20, whose TTFT no policy changes."""
    middle, tail = PRINTED["t21a"], PRINTED["t21b"]
    normal = NormalDist(middle, (tail - middle) / NormalDist().inv_cdf(0.95))
    base = reading(RATIO)
    worse = sum(max(0.0, copy_ms - K * base.compute_ms) >= copy_ms for copy_ms in base.copies_ms)
    return {
        "t21c": 100 * (1 - normal.cdf(5)),
        "t25b": float(worse),  # ranks of pairs in which Prefetch is not faster: W is 0 without such pairs
        **{f"t20{letter}": 1.0 for letter in LETTERS},
    }


def ssd_use(ratio: float, model: Model, gpu: Gpu, host: Host) -> float:
    """Fraction of the KV cache that fits neither in GPU nor in host memory."""
    held = gpu.memory_gib * 2**30 - model.weight_bytes
    return max(0.0, 1 - (held + host.dram_gib * 2**30) / (ratio * held))


def evaluate(machine: MachineOptions, simulated: Simulated, with_figures: bool) -> Evaluation:
    """Compute every value, without a window by events."""
    model, gpu, host = machine.profiles(MODELS_7B_UP[0], "h100", "tierkv")
    models = [model, *(Model.load(name) for name in MODELS_7B_UP[1:])]
    read, conserved, engine = (_sweeps(link) for link in (PRINTED_BUS, CONSERVED, ENGINE))
    ours = {**_blocks(models, gpu, host, Ssd.load("tierkv")), **read, **_models(models, PRINTED_BUS), **_requests()}
    ours |= {"t16c": conserved["t16a"], "t22a": 100 * ssd_use(RATIO * BURST, model, gpu, host)}
    gains = {f"{ratio}x": conserved[f"t6-{ratio}"] / _ahead(conserved, ratio) for ratio in COPIES}
    more: dict[str, Any] = {
        "conserved_gain": gains,
        "ssd_needed_beyond": _full(model, gpu, host),
        "median_error_percent_unsaturated": _unsaturated(ours),
    }
    notes = [
        "conserved_bus: the link carries every byte once; TPOT over LRU's is then "
        + ", ".join(f"{gain:.2f}x at {ratio}" for ratio, gain in gains.items())
    ]
    columns = {"conserved_bus": conserved | _models(models, CONSERVED)}
    extent = "in closed form; engine: by events"
    return Evaluation(values=ours, engine=engine, columns=columns, more=more, notes=notes, extent=extent)


def _unsaturated(ours: Values) -> float:
    """Median error of predicted rows, without windows so long that the reading saturates."""
    saturated = {f"{name}-{window}" for name in ("t13", "t14") for window in WINDOWS if window >= K}
    errors = [
        abs(claim.error_percent(ours[claim.id]))
        for claim in claims_of("tierkv")
        if claim.kind is ClaimKind.PREDICTED and claim.id not in saturated
    ]
    return median(errors)


def _ahead(values: Values, ratio: int) -> float:
    return values[f"t5-{ratio}" if ratio <= RATIO else f"t8-{ratio}"]


def _full(model: Model, gpu: Gpu, host: Host) -> float:
    """The oversubscription at which host memory is full too."""
    held = gpu.memory_gib * 2**30 - model.weight_bytes
    return (held + host.dram_gib * 2**30) / held


PAPER = Paper(
    name="tierkv",
    title="TierKV",
    claims=claims_of("tierkv"),
    calibrated=CALIBRATED,
    assumed=ASSUMED,
    evaluate=evaluate,
)
