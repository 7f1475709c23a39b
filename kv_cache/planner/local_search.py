"""Local search for a placement in bounded time, for batches that are too large for an exact search.

The options of one request or of two are changed while that shortens the step. A change is evaluated only if a lower
bound allows an improvement: a step is at least as long as the fetches due by any layer, the layers after it, and the
time that drives add to all of these. A first descent minimizes the bound alone, which costs little.
"""

from __future__ import annotations

import numpy as np

from csd_io.compiled import njit
from csd_spec.arrays import F64
from kv_cache.planner.problem import PlacementProblem, PlacementResult, run

EFFORT = 30_000  # bounds evaluated in each descent: a few milliseconds
_STEP = 50  # cost of the length of a step, in bounds


def local_search(problem: PlacementProblem, effort: int = EFFORT) -> PlacementResult | None:
    """Find a placement with a short step; None if no placement fits.

    The result does not depend on the speed of the machine.

    Args:
        problem: Costs and options.
        effort: Maximum number of changes to evaluate in each descent.
    """
    chosen, room = problem.held.argmin(axis=1), problem.costs.room
    if problem.held[np.arange(chosen.size), chosen].sum() > room:
        return None
    added = _added(problem)
    for exact in (False, True):
        _descend(exact, *problem.step, added, problem.held, room, effort, chosen)
    return problem.placement(chosen.tolist())


def _added(problem: PlacementProblem) -> F64:
    """Contribution of each option of a request to the bound at each layer, (R, options, L)."""
    fetches = np.zeros(problem.slower.shape)
    request, option, at = np.nonzero(problem.due >= 0)
    fetches[request, option, problem.due[request, option, at]] = problem.costs.fetch[request]
    added: F64 = fetches.cumsum(axis=2) + problem.slower[:, :, ::-1].cumsum(axis=2)[:, :, ::-1]
    return added


@njit(cache=True, nogil=True, fastmath={"nnan", "nsz"})
def _largest(total, old_first, new_first, old_second, new_second):  # type: ignore[no-untyped-def]
    """Bound after a change of two requests; of one if both parts of the second are the same."""
    most = 0.0
    for layer in range(total.size):
        most = max(most, total[layer] - old_first[layer] + new_first[layer] - old_second[layer] + new_second[layer])
    return most


@njit(cache=True, nogil=True)
def _totals(compute, added, chosen, total):  # type: ignore[no-untyped-def]
    """Bound at each layer."""
    late = 0.0
    for layer in range(compute.size - 1, -1, -1):
        late += compute[layer]
        total[layer] = late
    for request in range(chosen.size):
        total += added[request, chosen[request]]


@njit(cache=True, nogil=True)
def _descend(exact, compute, fetch, issued, due, slower, added, held, room, effort, chosen):  # type: ignore[no-untyped-def]
    """Change `chosen` while that shortens the step (`exact`) or its bound, and effort is left."""
    R, options = held.shape
    ends, total = np.zeros(compute.size + 1), np.zeros(compute.size)
    _totals(compute, added, chosen, total)
    run(compute, fetch, issued, due, slower, chosen, ends)
    shortest, used, at = ends[-1] if exact else total.max(), 0, 0
    for request in range(R):
        used += held[request, chosen[request]]
    while at < R * R and effort > 0:  # a request alone, then with the next one, then with the one after that
        one, other, better = at % R, (at % R + at // R) % R, False
        at += 1
        for second in range(options if one != other else 1):
            for first in range(options):
                a, b = chosen[one], chosen[other]
                second_now = second if one != other else b
                if first == a or (one != other and second == b):
                    continue
                held_now = used - held[one, a] + held[one, first] - held[other, b] + held[other, second_now]
                if held_now > room:
                    continue
                effort -= 1
                length = _largest(total, added[one, a], added[one, first], added[other, b], added[other, second_now])
                if length >= shortest * (1 - 1e-9):
                    continue
                chosen[other] = second_now
                chosen[one] = first
                if exact:
                    effort -= _STEP
                    run(compute, fetch, issued, due, slower, chosen, ends)
                    length = ends[-1]
                if length < shortest * (1 - 1e-9):
                    shortest, used, better = length, held_now, True
                    _totals(compute, added, chosen, total)
                else:
                    chosen[other] = b
                    chosen[one] = a
        if better:
            at = 0
