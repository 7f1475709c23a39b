"""A good placement in a bounded time, for batches that are too large to look at all that could be the best.

A choice is changed by one request, or by two, as long as that makes the step shorter. A change is tried only where a
bound leaves it a chance: a step is at least as long as the fetches due up to any layer, the layers from there on, and
what drives make all of them longer. That bound alone is made small first, since it costs little.
"""

from __future__ import annotations

import numpy as np

from csd_io.compiled import njit
from csd_spec.arrays import F64
from kv_cache.planner.problem import Placed, PlacementProblem, run

EFFORT = 30_000  # bounds that are looked at in either descent: some milliseconds
_STEP = 50  # of bounds that a step's length costs


def local_search(problem: PlacementProblem, effort: int = EFFORT) -> Placed | None:
    """A placement with a short step; None where none fits. The same for the same problem, however fast the machine is.

    effort: how many changes are looked at, at most.
    """
    chosen, room = problem.held.argmin(axis=1), problem.costs.room
    if problem.held[np.arange(chosen.size), chosen].sum() > room:
        return None
    added = _added(problem)
    for exact in (False, True):
        _descend(exact, *problem.step, added, problem.held, room, effort, chosen)
    return problem.placement(chosen.tolist())


def _added(problem: PlacementProblem) -> F64:
    """What an option of a request adds to the bound at each layer, (R, options, L)."""
    fetches = np.zeros(problem.slower.shape)
    request, option, at = np.nonzero(problem.due >= 0)
    fetches[request, option, problem.due[request, option, at]] = problem.costs.fetch[request]
    added: F64 = fetches.cumsum(axis=2) + problem.slower[:, :, ::-1].cumsum(axis=2)[:, :, ::-1]
    return added


@njit(cache=True, nogil=True, fastmath={"nnan", "nsz"})
def _largest(total, mine, wanted, its, other):  # type: ignore[no-untyped-def]
    """The bound after a change of two requests; of one where the second's parts are the same."""
    most = 0.0
    for layer in range(total.size):
        most = max(most, total[layer] - mine[layer] + wanted[layer] - its[layer] + other[layer])
    return most


@njit(cache=True, nogil=True)
def _totals(compute, added, chosen, total):  # type: ignore[no-untyped-def]
    """The bound at each layer."""
    late = 0.0
    for layer in range(compute.size - 1, -1, -1):
        late += compute[layer]
        total[layer] = late
    for request in range(chosen.size):
        total += added[request, chosen[request]]


@njit(cache=True, nogil=True)
def _descend(exact, compute, fetch, asked, due, slower, added, held, room, effort, chosen):  # type: ignore[no-untyped-def]
    """Change `chosen` while that makes the step shorter, or only its bound, and there is effort left."""
    R, options = held.shape
    ends, total = np.zeros(compute.size + 1), np.zeros(compute.size)
    _totals(compute, added, chosen, total)
    run(compute, fetch, asked, due, slower, chosen, ends)
    shortest, used, at = ends[-1] if exact else total.max(), 0, 0
    for request in range(R):
        used += held[request, chosen[request]]
    while at < R * R and effort > 0:  # a request alone, then with the one behind it, then with the next but one
        one, other, found = at % R, (at % R + at // R) % R, False
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
                    run(compute, fetch, asked, due, slower, chosen, ends)
                    length = ends[-1]
                if length < shortest * (1 - 1e-9):
                    shortest, used, found = length, held_now, True
                    _totals(compute, added, chosen, total)
                else:
                    chosen[other] = b
                    chosen[one] = a
        if found:
            at = 0
