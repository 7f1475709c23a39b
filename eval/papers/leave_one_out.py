"""Leave-one-out errors of a paper's claims: each is predicted by constants that are fitted to all the others.

Values are taken as linear in the constants: one evaluation with each calibrated constant STEP larger gives the slopes.
"""

from __future__ import annotations

import importlib
import os
import statistics
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np

from csd_spec.arrays import F64
from vcsd.progress import Tick
from vcsd_eval.papers import paper as papers
from vcsd_eval.papers.claims import ClaimKind
from vcsd_eval.papers.options import MachineOptions, Simulated
from vcsd_eval.papers.paper import Paper
from vcsd_eval.sweep import cores

STEP = 0.05
FITTED = (ClaimKind.CALIBRATED, ClaimKind.PREDICTED)
ROUNDS, LEAST = 50, 0.005  # of reweighting, and the error below which the weight of a row stays the same
SEEN = 1e-3  # a relative change of a value in the constants' direction that counts


def values_with(module: str, factors: Mapping[str, float]) -> dict[str, float]:
    """Our values of a paper with some of its constants multiplied. To be called in a process of its own.

    Args:
        module: Module with a `PAPER`.
        factors: Factor by `Constant.key`.
    """
    papers.FACTORS.update(factors)
    paper: Paper = importlib.import_module(module).PAPER
    if paper.values:
        return dict(paper.values())
    return dict(paper.evaluate(MachineOptions(), Simulated(workers=1), False).values)


def _quiet() -> None:
    """Hide the progress of a single evaluation; the caller shows that of all."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def leave_one_out(paper: Paper, module: str, tick: Tick) -> dict[str, Any]:
    """Errors of calibrated and predicted rows, bounds excluded, each left out of the fit.

    Returns:
        Median and worst error, percent, and the row of it; rows by id; `undetermined`: rows that alone fix a constant,
        so that the others do not determine it.
    """
    keys = [each.key for each in paper.calibrated]
    tried: list[dict[str, float]] = [{}, *({key: 1 + STEP} for key in keys)]
    with ProcessPoolExecutor(cores(), get_context("spawn"), initializer=_quiet, max_tasks_per_child=1) as pool:
        pending = [pool.submit(values_with, module, factors) for factors in tried]
        left_out = []
        for each in pending:
            left_out.append(each.result())
            tick(None)
    base, *changed = left_out
    claims = [each for each in paper.claims if each.kind in FITTED and not each.bound and each.value]
    printed = np.array([each.value for each in claims])
    errors = np.array([base[each.id] for each in claims]) / printed - 1
    slopes = np.array([[(each[claim.id] - base[claim.id]) / STEP for each in changed] for claim in claims])
    slopes = slopes.reshape(len(claims), len(keys)) / printed[:, None]
    rows, undetermined = {}, []
    for number, claim in enumerate(claims):
        others = np.arange(len(claims)) != number
        if not _determined(slopes[number], slopes[others]):
            undetermined.append(claim.id)
            continue
        moved = fit(errors[others], slopes[others])
        rows[claim.id] = 100 * float(errors[number] + slopes[number] @ moved)
    return _summary(rows) | {"rows": rows, "undetermined": undetermined}


def fit(errors: F64, slopes: F64) -> F64:
    """Relative changes of constants (C,) that make the sum of absolute errors least; reweighted least squares.

    Args:
        errors: Relative errors of rows, (R,).
        slopes: Their change by a relative change of each constant, (R, C).
    """
    moved: F64 = np.zeros(slopes.shape[1])
    for _ in range(ROUNDS):
        weights = np.sqrt(1 / np.maximum(np.abs(errors + slopes @ moved), LEAST))
        solution = np.linalg.lstsq(weights[:, None] * slopes, -weights * errors, rcond=SEEN)[0]
        moved = np.asarray(solution, np.float64)
    return moved


def _determined(slope: F64, others: F64) -> bool:
    """Whether the others fix everything that a row depends on."""
    left = slope - slope @ np.linalg.pinv(others, rcond=SEEN) @ others if others.size else slope
    return float(np.linalg.norm(left)) <= max(SEEN, 0.1 * float(np.linalg.norm(slope)))


def _summary(rows: Mapping[str, float]) -> dict[str, Any]:
    sizes = {name: abs(error) for name, error in rows.items()}
    worst = max(sizes, key=lambda name: sizes[name]) if sizes else None
    return {
        "median_error_percent": statistics.median(sizes.values()) if sizes else None,
        "worst_error_percent": sizes[worst] if worst else None,
        "worst_row": worst,
    }


def ticks(paper: Paper) -> int:
    """How often `leave_one_out` ticks."""
    return 1 + len(paper.calibrated)
