"""`vcsd bench planner`: instances, and an exhaustive search as reference.

partner of: eval/bench/plan.py
"""

import itertools

import numpy as np
import pytest

from kv_cache.planner.problem import PlacementProblem
from vcsd_eval.bench.plan import PlannerLoad, exhaustive, experiment, instance


def test_exhaustive_search_visits_all_placements():
    generator = np.random.default_rng(0)
    for requests in (1, 2, 3):
        problem = instance(generator, 12, requests)
        options = problem.held.shape[1]
        each = itertools.product(range(options), repeat=requests)
        fit = [c for c in each if sum(problem.held[r, o] for r, o in enumerate(c)) <= problem.costs.room]
        expected = min((problem.latency_s(c) for c in fit), default=None)
        assert exhaustive(problem) == (expected if expected is None else pytest.approx(expected, rel=1e-12))


def test_plans_are_compared_and_timed():
    pytest.importorskip("highspy")
    outcome = experiment(PlannerLoad(instances=12, timed=1))
    result = outcome.result
    assert result["wrong"] == result["false_infeasible"] == 0 and not outcome.failed
    assert set(result["sizes"]) == {"32x4", "32x8", "40x16", "80x8"}
    assert result["median_ms_32x4"] == result["sizes"]["32x4"]["ilp"]["median_ms"] > 0


def test_wrong_plan_is_detected(monkeypatch):
    pytest.importorskip("highspy")
    monkeypatch.setattr("vcsd_eval.bench.plan.solve", lambda problem, *_: _worst(problem))
    assert experiment(PlannerLoad(instances=8, timed=1)).failed


def _worst(problem: PlacementProblem):
    return problem.placement(problem.held.argmin(axis=1).tolist())
