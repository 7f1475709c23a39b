"""Pipeline of reads and compute: jobs pass through the same stages, each as soon as its inputs are ready.

A stage reads a job's part of a plan, or occupies a unit of a pool. The earliest ready stage goes first; ties go to the
lowest job, then to the lowest stage. The loop is compiled and includes the channel calendar: a decode step has hundreds
of small stages, and a Python call per read would cost more than the read. Reads are issued one by one, in the same
order, if the timing model is not compiled, has a listener, or the flash has bit errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
class ReadStage:
    """A stage that reads: job j reads the plan's streams bounds[j] to bounds[j + 1] (exclusive); bounds is (J + 1,)."""

    after: Sequence[int]  # earlier stages that must be complete
    plan: PagePlan
    bounds: I64


@dataclass(frozen=True, slots=True)
class UnitStage:
    """A stage that occupies a unit of a pool: ns (J,), then tail_ns (J,), during which later stages may run."""

    after: Sequence[int]
    pool: int
    ns: Sequence[int]
    tail_ns: Sequence[int]


StageTracer = Callable[[int, int, int, bool], None]
"""Receives the number of a stage, begin and end, ns, and whether it is the stage's tail."""


class CriticalStage(NamedTuple):
    """A stage, or its tail, on the critical path of the last job, and its end."""

    stage: int
    tail: bool
    finish_ns: int


@njit(inline="always")
def _last(number, tail_ns):  # type: ignore[no-untyped-def]
    """Number of a stage's tail; the stage's own number if it has no tail."""
    return number + tail_ns.size * (tail_ns[number] > 0)


@njit(cache=True, nogil=True)
def _advance(after, pools, ns, tails, pages, ppns, nbytes, asks, calendar, ready, missing, users, ends, causes, end_ns):  # type: ignore[no-untyped-def]
    """Run ready stages until all are done; with `asks`, return the number of a stage whose read must be timed.

    The caller then calls again with the end of that read. Numbers are job * stages + stage; tails come after all
    stages, and the last two numbers are the start and the end of the critical path.
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
    """Initial state: ready times and counts of missing inputs, last user of each unit, ends, causes."""
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


def pipeline(
    store: FlashStore,
    stages: Sequence[ReadStage | UnitStage],
    pools: Sequence[int],
    start_ns: int,
    tracer: StageTracer | None = None,
) -> list[CriticalStage]:
    """Schedule all stages of all jobs.

    Args:
        stages: Stages of every job, in order.
        pools: Units of each pool, at least 1.
        start_ns: Simulated time of the command, ns.
        tracer: Called for the work of each unit stage, and for its tail.

    Returns:
        The critical path, first stage first.

    Raises:
        UncorrectableReadError: A page has more bit errors than the ECC corrects.
    """
    jobs = next(len(each.ns) if isinstance(each, UnitStage) else each.bounds.size - 1 for each in stages)
    fetches = {number: each for number, each in enumerate(stages) if isinstance(each, ReadStage)}
    after = np.array([[earlier in each.after for earlier in range(len(stages))] for each in stages])
    work = *_busy(stages, jobs), *_pages(fetches, len(stages), jobs)
    calendar = store.begin_reads([fetch.plan for fetch in fetches.values()])
    ready, *state, ends, causes = _start(after, jobs, np.array(pools), start_ns)
    reading, end_ns = (not calendar, calendar or _NO_CALENDAR), -1
    while (number := _advance(after, *work, *reading, ready, *state, ends, causes, end_ns)) != _DONE:
        job, stage = divmod(number, len(stages))
        each = fetches[stage]
        end_ns = store.read(each.plan.part(*each.bounds[job : job + 2].tolist()), int(ready[job, stage]))
    if tracer:
        _trace(stages, ends.tolist(), jobs, tracer)
    return _chain(causes.tolist(), ends.tolist(), len(stages))


def _trace(stages: Sequence[ReadStage | UnitStage], ends: list[int], jobs: int, tracer: StageTracer) -> None:
    """Report the times of all units."""
    for number, stage in enumerate(stages):
        if isinstance(stage, ReadStage):
            continue
        for job in range(jobs):
            end_ns, tail_ns = ends[job * len(stages) + number], stage.tail_ns[job]
            tracer(number, end_ns - stage.ns[job], end_ns, False)
            if tail_ns:
                tracer(number, end_ns, end_ns + tail_ns, True)


def _chain(causes: list[int], ends: list[int], stages: int) -> list[CriticalStage]:
    """Follow the causes from the last end back to the start."""
    chain, node, start = list[CriticalStage](), causes[-1], len(ends) - 1
    while node != start:
        assert len(chain) < start, "the critical path has a cycle"
        chain.append(CriticalStage(node % stages, node >= start // 2, ends[node]))
        node = causes[node]
    return chain[::-1]


def _busy(stages: Sequence[ReadStage | UnitStage], jobs: int) -> tuple[I64, I64, I64]:
    """Pool of each stage, (I,), -1 for reads; busy time and tail time of each stage of each job, (J * I,) ns."""
    ns, tail_ns = np.zeros((2, jobs, len(stages)), np.int64)
    pools = np.full(len(stages), -1)
    for number, stage in enumerate(stages):
        if isinstance(stage, UnitStage):
            pools[number], ns[:, number], tail_ns[:, number] = stage.pool, stage.ns, stage.tail_ns
    return pools, ns.ravel(), tail_ns.ravel()


def _pages(fetches: dict[int, ReadStage], stages: int, jobs: int) -> tuple[I64, NDArray[np.uint32], I64]:
    """Bounds (I, J + 1) of each job's pages among all pages (P,), the pages, and their bytes (P,)."""
    bounds, pages = np.zeros((stages, jobs + 1), np.int64), 0
    for number, fetch in fetches.items():
        until = np.zeros(fetch.plan.ends.size + 1, np.int64)
        until[1:] = fetch.plan.ends
        bounds[number] = until[fetch.bounds] + pages
        pages += fetch.plan.ppns.size
    if not fetches:
        return bounds, np.zeros(0, np.uint32), np.zeros(0, np.int64)
    ppns = np.concatenate([fetch.plan.ppns for fetch in fetches.values()])
    return bounds, ppns, np.concatenate([fetch.plan.nbytes for fetch in fetches.values()])
