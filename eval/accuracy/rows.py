"""Rows of an accuracy run: each trial's figures with intervals, and their paired differences from dense attention."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from csd_spec.arrays import F64
from vcsd_eval.accuracy.compared_methods import Trial
from vcsd_eval.accuracy.intervals import Shape, bootstrap, clopper_pearson, mcnemar, paired_bootstrap, ratio
from vcsd_eval.accuracy.plan import MeasurementPlan, Turn
from vcsd_eval.accuracy.tasks import TASKS

REFERENCE = "reference_bits_per_byte"  # a count of dense turns, by plain transformers


def rows(done: list[Turn], plan: MeasurementPlan) -> list[dict[str, Any]]:
    """Rows of all trials that are shown.

    Args:
        done: Turns of all trials on all batches.
        plan: The measurement.

    Returns:
        A row for each trial and figure, and for each group of samples in addition where samples have groups. Shares
        are of all bytes of the KV data in the decode steps of the trial.
    """
    (dense,) = (_Measured(done, trial) for trial in plan.trials() if trial.is_dense)
    return [row for trial in plan.shown() for row in _rows(_Measured(done, trial), dense, plan)]


def reference(done: list[Turn], plan: MeasurementPlan) -> float | None:
    """Bits a byte by plain transformers over the same windows; None for a task that generates."""
    (trial,) = (trial for trial in plan.trials() if trial.is_dense)
    dense = _Measured(done, trial)
    return ratio(dense.pairs(REFERENCE, "")) if REFERENCE in dense.metrics else None


class _Measured:
    """All turns of one trial, sample by sample."""

    def __init__(self, done: list[Turn], trial: Trial) -> None:
        self.trial, turns = trial, [turn for turn in done if turn.is_of(trial)]
        turns.sort(key=lambda turn: turn.batch)
        self.samples = [each for turn in turns for each in zip(turn.samples, turn.groups, strict=True)]
        self.groups = sorted({group for _, group in self.samples if group}, key=_numbers)
        self.metrics = list(self.samples[0][0])
        whole = sum(turn.dense_bytes for turn in turns)
        self.bytes_share = sum(turn.useful_bytes for turn in turns) / whole
        self.pages_share = sum(turn.fetched_bytes for turn in turns) / whole

    def pairs(self, metric: str, group: str) -> F64:
        """Numerators and denominators (N, 2) of a group's samples; of all for an empty group."""
        return np.array([counts[metric] for counts, mine in self.samples if group in ("", mine)], np.float64)


def _numbers(group: str) -> tuple[list[float], str]:
    """Sorts groups by the numbers in their names: 512 tokens before 1024."""
    return [float(each) for each in re.findall(r"\d+(?:\.\d+)?", group)], group


def _rows(measured: _Measured, dense: _Measured, plan: MeasurementPlan) -> Iterator[dict[str, Any]]:
    trial = measured.trial
    for metric in measured.metrics:
        if metric == REFERENCE:
            continue
        for group in ["", *measured.groups]:
            pairs, others = measured.pairs(metric, group), dense.pairs(metric, group)
            shape: Shape = math.exp if metric == "perplexity" else float
            binary = metric in TASKS[plan.task].binary
            row = {
                "method": trial.contender.name,
                "compression": trial.c,
                "convention": trial.convention,
                "bytes_share": measured.bytes_share,
                "pages_share": measured.pages_share,
                "metric": f"{metric}, {group}" if group else metric,
                **_figure(pairs, shape, plan.seed, binary),
                "sample_values": [shape(each) for each in pairs[:, 0] / pairs[:, 1]],
            }
            yield row if trial.is_dense else row | _difference(pairs, others, shape, plan.seed, binary)


def _figure(pairs: F64, shape: Shape, seed: int, binary: bool) -> dict[str, Any]:
    """A figure and its 95 % interval."""
    if binary:
        low, high = clopper_pearson(round(pairs[:, 0].sum()), len(pairs))
    else:
        low, high = bootstrap(pairs, seed, shape)
    interval = "binomial" if binary else "bootstrap"
    return {"value": shape(ratio(pairs)), "ci_low": low, "ci_high": high, "interval": interval}


def _difference(pairs: F64, dense: F64, shape: Shape, seed: int, binary: bool) -> dict[str, Any]:
    """A figure minus dense attention's on the same samples, with the interval over the pairs."""
    low, high = paired_bootstrap(pairs, dense, seed, shape)
    row: dict[str, Any] = {
        "difference": shape(ratio(pairs)) - shape(ratio(dense)),
        "difference_low": low,
        "difference_high": high,
    }
    if binary:
        lost = int(((dense[:, 0] == 1) & (pairs[:, 0] == 0)).sum())
        gained = int(((dense[:, 0] == 0) & (pairs[:, 0] == 1)).sum())
        row |= {"lost": lost, "gained": gained, "p_value": mcnemar(lost, gained)}
    return row
