"""Reads between the work of units: jobs go through the same stages, each as soon as what it waits for is done.

A stage of a job reads its part of a plan, or keeps a unit of a pool busy. What is ready first goes first, of equals the
lowest job and then the lowest stage. Compiled, with the calendar's reads inside the loop: a step has hundreds of small
ones, and asking for one takes longer than its pages. A model of time that is not compiled, one that somebody listens
to, or flash with bit errors is asked for one read at a time, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from csd_io.compiled import njit
from csd_spec.arrays import I64
from ftl.flash.plan import PagePlan
from ftl.flash.store import FlashStore
from ftl.flash.timing.calendar import occupy

NEVER = np.iinfo(np.int64).max
_DONE = -1
_NO_CALENDAR = 1, 0, 0, False, 1, 1, *(np.zeros(shape, np.int64) for shape in (1, (1, 1), (1, 3)))


@dataclass(frozen=True, slots=True)
class Fetch:
    """A stage that reads: job j the streams of a plan from bounds[j] to before bounds[j + 1], bounds (J + 1,)."""

    after: Sequence[int]  # earlier stages that a job has to be done with
    plan: PagePlan
    bounds: I64


@dataclass(frozen=True, slots=True)
class Use:
    """A stage that keeps a unit of a pool busy, for ns (J,) and then for tail_ns (J,)."""

    after: Sequence[int]
    pool: int
    ns: Sequence[int]
    tail_ns: Sequence[int]


class Link(NamedTuple):
    """A stage of the chain of waits at whose end the last job ends, or its tail, and when that ended."""

    stage: int
    tail: bool
    finish_ns: int


@njit(inline="always")
def _last(number, tail_ns):  # type: ignore[no-untyped-def]
    """The number of a stage's tail, or its own where it has none."""
    return number + tail_ns.size * (tail_ns[number] > 0)


@njit(cache=True, nogil=True)
def _advance(after, pools, ns, tails, pages, ppns, nbytes, asks, calendar, ready, missing, users, ends, causes, end_ns):  # type: ignore[no-untyped-def]
    """Carry out what is ready until all is done; with `asks`, until a read has to be asked for, and its number comes.

    Called again with when that ends. Numbers are job * stages + stage; a tail's is beyond all of those, the last two
    are the start and the end of the chain.
    """
    jobs, stages = ready.shape
    start = 2 * jobs * stages
    soonest = np.array([ready[job].min() for job in range(jobs)])
    while True:
        job = np.argmin(soonest)
        if soonest[job] == NEVER:
            return _DONE
        stage = np.argmin(ready[job])
        number = job * stages + stage
        cause = _DONE
        for earlier in range(stage):
            if after[stage, earlier]:
                other = _last(job * stages + earlier, tails)
                if cause < 0 or ends[other] > ends[cause]:
                    cause = other
        if cause < 0:
            cause = start
        pool = pools[stage]
        if pool < 0:
            if asks and end_ns < 0:
                return number
            if not asks:
                part = slice(pages[stage, job], pages[stage, job + 1])
                end_ns = occupy(ppns[part], nbytes[part], ready[job, stage], *calendar)
            ends[number], causes[number] = end_ns, cause
            end_ns = -1
        else:
            free = 0
            for user in range(users.shape[1]):
                if users[pool, user] >= 0 and ends[users[pool, user]] < ends[users[pool, free]]:
                    free = user
            if ends[users[pool, free]] > ends[cause]:
                cause = users[pool, free]
            ends[number], causes[number] = ends[cause] + ns[number], cause
            tail = _last(number, tails)
            if tail != number:
                ends[tail], causes[tail] = ends[number] + tails[number], number
            users[pool, free] = tail
        last = _last(number, tails)
        if causes[start + 1] < 0 or ends[last] > ends[causes[start + 1]]:
            causes[start + 1] = last
        ready[job, stage] = NEVER
        for later in range(stage + 1, stages):
            if after[later, stage]:
                missing[job, later] -= 1
                if missing[job, later] == 0:
                    ready_ns = ends[start]
                    for earlier in range(later):
                        if after[later, earlier]:
                            ready_ns = max(ready_ns, ends[_last(job * stages + earlier, tails)])
                    ready[job, later] = ready_ns
        soonest[job] = ready[job].min()


@njit(cache=True)
def _start(after, jobs, units, start_ns):  # type: ignore[no-untyped-def]
    """Before anything is done: when a stage is ready and how many it waits for, who used a unit last, ends, causes."""
    stages = after.shape[0]
    start = 2 * jobs * stages
    ready, missing = np.full((jobs, stages), NEVER), np.empty((jobs, stages), np.int64)
    for stage in range(stages):
        missing[:, stage] = after[stage].sum()
        if missing[0, stage] == 0:
            ready[:, stage] = start_ns
    users = np.full((units.size, units.max()), -1)
    for pool in range(units.size):
        users[pool, : units[pool]] = start
    return ready, missing, users, np.full(start + 1, start_ns), np.full(start + 2, -1)


def pipeline(store: FlashStore, stages: Sequence[Fetch | Use], pools: Sequence[int], start_ns: int) -> list[Link]:
    """When everything is done: the chain of waits behind what ends last, from its beginning.

    pools: how many units each has, at least one. Raises Uncorrectable as a read does.
    """
    jobs = next(len(each.ns) if isinstance(each, Use) else each.bounds.size - 1 for each in stages)
    fetches = {number: each for number, each in enumerate(stages) if isinstance(each, Fetch)}
    after = np.array([[earlier in each.after for earlier in range(len(stages))] for each in stages])
    work = *_busy(stages, jobs), *_pages(fetches, len(stages), jobs)
    calendar = store.begin_reads([each.plan for each in fetches.values()])
    ready, *state, ends, causes = _start(after, jobs, np.array(pools), start_ns)
    reading, end_ns = (not calendar, calendar or _NO_CALENDAR), -1
    while (number := _advance(after, *work, *reading, ready, *state, ends, causes, end_ns)) != _DONE:
        job, stage = divmod(number, len(stages))
        each = fetches[stage]
        end_ns = store.read(each.plan.part(*each.bounds[job : job + 2].tolist()), int(ready[job, stage]))
    return _chain(causes.tolist(), ends.tolist(), len(stages))


def _chain(causes: list[int], ends: list[int], stages: int) -> list[Link]:
    """What the last cause came after, from the start on."""
    chain, node, start = list[Link](), causes[-1], len(ends) - 1
    while node != start:
        chain.append(Link(node % stages, node >= start // 2, ends[node]))
        node = causes[node]
    return chain[::-1]


def _busy(stages: Sequence[Fetch | Use], jobs: int) -> tuple[I64, I64, I64]:
    """The pool (I,) of each stage, -1 for a read; its time and its tail's, (J * I,)."""
    ns, tail_ns = np.zeros((2, jobs, len(stages)), np.int64)
    pools = np.full(len(stages), -1)
    for number, each in enumerate(stages):
        if isinstance(each, Use):
            pools[number], ns[:, number], tail_ns[:, number] = each.pool, each.ns, each.tail_ns
    return pools, ns.ravel(), tail_ns.ravel()


def _pages(fetches: dict[int, Fetch], stages: int, jobs: int) -> tuple[I64, NDArray[np.uint32], I64]:
    """The bounds (I, J + 1) of each job's pages among all pages (P,), and their bytes (P,)."""
    bounds, pages = np.zeros((stages, jobs + 1), np.int64), 0
    for number, each in fetches.items():
        until = np.zeros(each.plan.ends.size + 1, np.int64)
        until[1:] = each.plan.ends
        bounds[number] = until[each.bounds] + pages
        pages += each.plan.ppns.size
    if not fetches:
        return bounds, np.zeros(0, np.uint32), np.zeros(0, np.int64)
    ppns = np.concatenate([each.plan.ppns for each in fetches.values()])
    return bounds, ppns, np.concatenate([each.plan.nbytes for each in fetches.values()])
