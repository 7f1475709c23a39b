"""Fit the drive's line to the full emulator, and compare it at compositions that were not fitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from csd_spec import DriveSpec, ModelShape
from kv_cache.trace import Request
from vcsd_eval.fleet.drive_model import Coefficients, DriveRates
from vcsd_eval.fleet.emulated import EmulatedDrive

LAYERS, REQUESTS = 4, 50
DRIVES = (1, 4, 8)  # compared
FIT_BATCHES = (1, 2, 3, 5, 8, 13, 24, 40)  # sequences of the fitted compositions
FIT_TOKENS = (256, 49152)  # least and most of their lengths, log-uniform
TWINS = 3  # drives with the same sequences and other histories, for their spread
POINTS = 10  # decode steps that are compared
QUANTILES = 41


@dataclass(frozen=True, slots=True)
class CalibrationBench:
    """Drive and model to emulate. shape: the whole model."""

    spec: DriveSpec
    shape: ModelShape
    seed: int = 0

    def heads(self, drives: int) -> int:
        """KV heads of the drive that has the most."""
        return -(-self.shape.kv_heads // drives)

    def drive(self, drives: int, context: int, number: int) -> EmulatedDrive:
        """One of several drives that share the heads."""
        heads = self.heads(drives)
        group = self.shape.q_heads // self.shape.kv_heads
        share = replace(self.shape, layers=LAYERS, kv_heads=heads, q_heads=heads * group)
        return EmulatedDrive(self.spec, share, context, 1000 * self.seed + number)


def compositions(seed: int) -> list[list[int]]:
    """Lengths of the sequences of each fitted composition; none is of a trace."""
    generator, (least, most) = np.random.default_rng(seed), np.log(FIT_TOKENS)
    return [np.exp(generator.uniform(least, most, count)).astype(int).tolist() for count in FIT_BATCHES]


def over_time(requests: Sequence[Request], points: int = POINTS) -> list[dict[int, int]]:
    """Stored tokens by request at some decode steps of a batch that all requests begin together."""
    last = max(request.output_tokens for request in requests)
    steps = sorted({round(at) for at in np.linspace(0, last - 1, points)})
    return [
        {request.number: request.input_tokens + step for request in requests if request.output_tokens > step}
        for step in steps
    ]


def measure(drives: Sequence[EmulatedDrive], held: Mapping[int, int]) -> np.ndarray:
    """Seconds of each layer's step on each drive, (drives, layers)."""
    for drive in drives:
        drive.hold(held)
    return np.array([drive.layers_s() for drive in drives if held])


def fit(bench: CalibrationBench) -> tuple[tuple[float, float], list[float], float]:
    """Coefficients, quantiles of a drive's ratio to the mean, and the fit's mean deviation in percent.

    Least squares of relative deviations: short steps count as much as long ones.
    """
    rows, ratios = list[tuple[float, float]](), list[float]()
    for drives in DRIVES:
        twins = [bench.drive(drives, FIT_TOKENS[1], number) for number in range(TWINS)]
        rates = DriveRates.of(bench.spec, bench.shape, bench.heads(drives))
        for tokens in compositions(bench.seed):
            measure(twins, {})
            seconds = measure(twins, dict(enumerate(tokens)))
            ratios += (seconds / seconds.mean(axis=0)).ravel().tolist()
            rows.append((1 / seconds.mean(), rates.chain_s(tokens) / seconds.mean()))
    matrix = np.array(rows)
    solution = np.linalg.lstsq(matrix, np.ones(len(rows)), rcond=None)[0]
    quantiles = np.quantile(ratios, np.linspace(0, 1, QUANTILES))
    percent = 100 * float(np.abs(matrix @ solution - 1).mean())
    return (float(solution[0]), float(solution[1])), [round(quantile, 5) for quantile in quantiles.tolist()], percent


def deviations(
    bench: CalibrationBench, fitted: Coefficients, requests: Sequence[Request], drives: int, points: int = POINTS
) -> list[float]:
    """Percent by which the model's step differs from the emulator's, at each composition.

    A step is over when the slowest drive has each layer: layers wait for one another.
    """
    context = max(request.tokens for request in requests)
    emulated = [bench.drive(drives, context, 100 + number) for number in range(drives)]  # not those of the fit
    rates, percents = DriveRates.of(bench.spec, bench.shape, bench.heads(drives)), []
    for held in over_time(requests, points):
        seconds = measure(emulated, held).max(axis=0).sum()
        modelled = LAYERS * fitted.slowest(drives) * rates.layer_s(fitted, list(held.values()))
        percents.append(100 * abs(modelled / seconds - 1))
    return percents


def calibrate(bench: CalibrationBench, requests: Sequence[Request], name: str, command: str) -> Coefficients:
    """Fitted coefficients with their deviation at the first requests of a trace."""
    (command_s, transfer), ratios, percent = fit(bench)
    fitted = Coefficients(
        made_by=command, trace=name, command_s=command_s, transfer=transfer, ratios=ratios,
        fit_percent=percent, deviation_percent={}, worst_percent={},
    )  # fmt: skip
    chosen = [drive for drive in DRIVES if drive <= bench.shape.kv_heads]
    compared = {each: deviations(bench, fitted, requests[:REQUESTS], each) for each in chosen}
    return replace(
        fitted,
        deviation_percent={each: float(np.mean(percents)) for each, percents in compared.items()},
        worst_percent={each: max(percents) for each, percents in compared.items()},
    )
