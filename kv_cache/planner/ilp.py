"""Placement as an integer program, as in OrbitFlow's planner (section 3.3), solved by HiGHS.

One option of each request is chosen. A step is at least as long as any chain. A chain consists of layers that are
computed one after another, and of stretches from the end of layer a to the start of layer b that contain all fetches
issued since a and due by b. The model starts with some chains; while the longest chain of a solution is unknown to the
solver, it is added and the model is solved again.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from csd_spec.arrays import F64, I64
from csd_spec.optional import require
from kv_cache.planner.problem import PlacementProblem, PlacementResult

UNIT = 1e3  # scaled compute time of a step: HiGHS's tolerances are absolute
_TOLERANCE = 1e-9
# Presolve stays on: without it, HiGHS 1.15.1 at times cuts off the optimum and reports the model infeasible.
# Heuristics are off: the model is small and starts from a good choice.
_OPTIONS: dict[str, Any] = {
    "output_flag": False,
    "threads": 1,
    "mip_abs_gap": 0.0,
    "presolve": "on",
    "mip_heuristic_run_feasibility_jump": False,
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_rins": False,
    "mip_heuristic_run_root_reduced_cost": False,
}


Row = tuple[F64, float, float]  # coefficients, lower and upper bound of the sum


def solve(problem: PlacementProblem, gap: float = 0.0, limit_s: float = 60.0) -> PlacementResult | None:
    """Find the placement with the shortest step.

    Args:
        problem: Costs and options of all requests.
        gap: Fraction of the shortest step by which the step found may be longer.
        limit_s: Wall-clock limit, seconds. After it, the best placement so far is returned.

    Returns:
        Placement; None if no placement fits.

    Raises:
        MissingExtraError: HiGHS is not installed.
    """
    good = problem.local_optimum()
    if good is None:
        return None
    best, model, until_s = problem.placement(good), _Model(problem, good, gap), time.monotonic() + limit_s
    while (left_s := until_s - time.monotonic()) > 0 and (chosen := model.solve(left_s)) is not None:
        candidate = problem.placement(chosen.tolist())
        best = min(best, candidate, key=lambda placement: placement.latency_s)
        if not model.add_broken(chosen):
            break
    return best  # the initial choice if the solver finds no better one


class _Model:
    """Variables: options of each request, concatenated, then the length of the step, shorter than the step of `good`.

    A step is within the gap if it is at most 1 + gap times the shortest one. HiGHS's gap and the limit are fractions of
    the longer step: gap / (1 + gap).
    """

    def __init__(self, problem: PlacementProblem, good: list[int], gap: float) -> None:
        self.problem, costs = problem, problem.costs
        self.scale = UNIT / float(costs.compute.sum())
        self.R, self.options = problem.held.shape
        self.L, self.choices = costs.layers, problem.held.size
        ends = problem.ends(good)
        self.known = [
            *([(0, b)] for b in range(self.L)),
            *(self._own(option) for option in range(1, self.options)),
            self._chain(np.array(good), ends),
        ]
        rows = [
            *(self._one_of(request) for request in range(self.R)),
            self._capacity(),
            *map(self._bound, self.known),
        ]
        cut = gap / (1 + gap)
        self.solver = _solver(rows, self.choices, self.scale * float(ends[-1]) * (1 - max(cut, _TOLERANCE)), cut)

    def _own(self, option: int) -> list[tuple[int, int]]:
        """Stretches in which a request waits only for its own fetches."""
        issued, due = self.problem.issued[0, option], self.problem.due[0, option]
        return [(int(a), int(b)) for a, b in zip(issued, due, strict=True) if b >= 0]

    def _one_of(self, request: int) -> Row:
        row = np.zeros(self.choices + 1)
        row[request * self.options : (request + 1) * self.options] = 1
        return row, 1.0, 1.0

    def _capacity(self) -> Row:
        return np.append(self.problem.held.ravel() / self.problem.costs.room, 0.0), -np.inf, 1.0

    def _bound(self, fetches: list[tuple[int, int]]) -> Row:
        """Constraint: the step is at least as long as these stretches of fetches plus the layers outside of them.

        Args:
            fetches: Pairs (a, b): fetches issued after the end of a and due by b; they do not overlap.
        """
        compute, slower = self.problem.costs.compute, self.problem.slower
        outside = np.ones(self.L, bool)
        takes = np.zeros(self.problem.held.shape)
        for a, b in fetches:
            outside[a:b] = False
            takes += self._fetched(a, b)
        takes += slower[:, :, outside].sum(axis=2)
        return np.append(-self.scale * takes.ravel(), 1.0), self.scale * float(compute[outside].sum()), np.inf

    def _fetched(self, a: int, b: int) -> F64:
        """Seconds of the fetches issued after the end of a and due by b, (R, options)."""
        between = (self.problem.issued >= a) & (self.problem.due >= 0) & (self.problem.due <= b)
        seconds: F64 = between.sum(axis=2) * self.problem.costs.fetch[:, None]
        return seconds

    def solve(self, limit_s: float) -> I64 | None:
        """Option of each request, (R,); None if no choice is left or the time limit is reached."""
        solver = self.solver
        solver.setOptionValue("time_limit", limit_s)
        solver.run()
        if solver.modelStatusToString(solver.getModelStatus()) != "Optimal":
            return None
        values = np.array(solver.getSolution().col_value[: self.choices])
        chosen: I64 = values.reshape(self.R, self.options).argmax(axis=1)
        return chosen

    def add_broken(self, chosen: I64) -> bool:
        """Add the longest chain of a choice if its step is longer than in the model; False if nothing was added."""
        ends = self.problem.ends(chosen.tolist())
        chain = self._chain(chosen, ends)
        if chain in self.known or ends[-1] <= self._objective_s() + _TOLERANCE * ends[-1]:
            return False  # for a known chain, the difference is the solver's tolerance
        self.known.append(chain)
        _add(self.solver, [self._bound(chain)])
        return True

    def _objective_s(self) -> float:
        return float(self.solver.getSolution().col_value[self.choices]) / self.scale

    def _chain(self, chosen: I64, ends: F64) -> list[tuple[int, int]]:
        """Stretches of fetches on the critical path of the step, the last one first."""
        stretches, layer, requests = list[tuple[int, int]](), self.L - 1, np.arange(self.R)
        while layer >= 0:
            took = self.problem.costs.compute[layer] + self.problem.slower[requests, chosen, layer].sum()
            start = ends[layer + 1] - took
            if start > ends[layer] * (1 + _TOLERANCE):
                late = [start - ends[a] - self._fetched(a, layer)[requests, chosen].sum() for a in range(layer + 1)]
                since = int(np.abs(late).argmin())
                stretches.append((since, layer))
                layer = since
            layer -= 1
        return stretches


def _solver(rows: list[Row], choices: int, limit: float, gap: float) -> Any:
    """Create a HiGHS model of these rows that minimizes the last variable.

    Args:
        rows: Constraints.
        choices: Number of binary variables.
        limit: Upper bound of the last variable.
        gap: HiGHS's relative gap, a fraction of the step that it finds.
    """
    require("the integer program", "serving", "highspy")
    import highspy

    solver = highspy.Highs()
    for name, value in {**_OPTIONS, "mip_rel_gap": gap}.items():
        solver.setOptionValue(name, value)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = choices + 1, 0
    lp.col_cost_ = np.append(np.zeros(choices), 1.0)
    lp.col_lower_ = np.zeros(choices + 1)
    lp.col_upper_ = np.append(np.ones(choices), limit)
    lp.integrality_ = [highspy.HighsVarType.kInteger] * choices + [highspy.HighsVarType.kContinuous]
    lp.a_matrix_.start_ = np.zeros(choices + 2, np.int32)
    solver.passModel(lp)
    _add(solver, rows)
    return solver


def _add(solver: Any, rows: list[Row]) -> None:
    for row, low, high in rows:
        where = np.flatnonzero(row).astype(np.int32)
        solver.addRow(low, high, where.size, where, row[where])
