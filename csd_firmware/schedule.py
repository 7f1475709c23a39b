"""When a step's work is done: its pages and its arithmetic, one after the other or each head as soon as it can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from attention_engine import Compute, EngineClock, Read
from csd_firmware.stopwatch import Stopwatch
from ftl import Ftl

Work = Sequence[Read | Compute]
MAX_JOBS = 256


@dataclass(frozen=True, slots=True)
class Units:
    """What works on a step: the flash with its filters, and the engine."""

    ftl: Ftl
    clock: EngineClock

    def compute(self, item: Compute, streams: slice) -> tuple[int, int]:
        """Nanoseconds of a unit for some streams, and those that softmax takes beyond it; one kernel's worth."""
        lines, length = item.lines[streams], item.length[streams]
        if item.job == "argtopk":
            return self.clock.topk_ns(int(lines @ length)), 0
        beats = int(lines @ -(-length // self.clock.spec.lanes)) * item.queries
        ns, scores = self.clock.kernel_ns(beats), int(item.scores[streams].sum()) * item.queries
        return ns, max(0, self.clock.softmax_ns(scores) - ns)


def serial(work: Work, units: Units, watch: Stopwatch) -> None:
    """One phase of all streams after the other, kernels share each by load: the reading of the paper's figures."""
    for item in work:
        if isinstance(item, Read):
            watch.until(item.unit, units.ftl.read(item.plan, watch.now_ns))
        else:
            ns, softmax_ns = units.compute(item, slice(None))
            share = units.clock.spec.kernels if item.job == "kernel" else 1
            watch.spend(item.unit, -(-ns // share))
            watch.spend("softmax", -(-softmax_ns // share))


@dataclass(frozen=True, slots=True)
class _Done:
    """One job's part of an item: which unit took it until when, right after what."""

    unit: str
    finish_ns: int
    cause: _Done | None


def overlapped(work: Work, units: Units, watch: Stopwatch) -> None:
    """Every stream by itself: flash of one under the arithmetic of another, V under the logits of K.

    A read waits for the last argtopk before it, a unit for all that came before. Units take first what is ready first.
    The nanoseconds are those of the chain of waits at whose end the last stream ends. More than MAX_JOBS streams go as
    bundles of neighbours.
    """
    start = _Done("", watch.now_ns, None)
    if not work:
        return
    streams = max(item.lines.size if isinstance(item, Compute) else item.plan.ends.size for item in work)
    size = -(-streams // MAX_JOBS)
    before = [_waits_for(work, number) for number in range(len(work))]
    after = [[later for later in range(len(work)) if number in before[later]] for number in range(len(work))]
    last_use = {"argtopk": [start], "kernel": [start] * units.clock.spec.kernels}
    done: dict[tuple[int, int], _Done] = {}
    first, jobs = [number for number in range(len(work)) if not before[number]], range(-(-streams // size))
    ready = [(start.finish_ns, job, number) for job in jobs for number in first]
    heapify(ready)
    while ready:
        now_ns, job, number = heappop(ready)
        item = work[number]
        cause = max((done[job, earlier] for earlier in before[number]), key=_finish_ns, default=start)
        if isinstance(item, Read):
            plan = item.plan.part(*_share(job * size, size, item.plan.ends.size, streams))
            end = _Done(item.unit, units.ftl.read(plan, now_ns), cause)
        else:
            users = last_use[item.job]
            free = min(range(len(users)), key=lambda number: users[number].finish_ns)
            cause = max(cause, users[free], key=_finish_ns)
            ns, softmax_ns = units.compute(item, slice(*_share(job * size, size, item.lines.size, streams)))
            end = _Done(item.unit, cause.finish_ns + ns, cause)
            if softmax_ns:
                end = _Done("softmax", end.finish_ns + softmax_ns, end)
            users[free] = end
        done[job, number] = end
        for later in after[number]:
            if all((job, earlier) in done for earlier in before[later]):
                ready_ns = max(done[job, earlier].finish_ns for earlier in before[later])
                heappush(ready, (ready_ns, job, later))
    chain, end = [], max(done.values(), key=_finish_ns, default=start)
    while end.cause:
        chain.append(end)
        end = end.cause
    for link in reversed(chain):
        watch.until(link.unit, link.finish_ns)


def _share(first: int, count: int, size: int, streams: int) -> tuple[int, int]:
    """The part of an item of `size` streams for `count` of all: a query head may have become a stream of its own."""
    return first * size // streams, min(first + count, streams) * size // streams


def _finish_ns(done: _Done) -> int:
    return done.finish_ns


def _waits_for(work: Work, number: int) -> list[int]:
    """Earlier items that one has to wait for."""
    if isinstance(work[number], Compute):
        return list(range(number))
    decisions = [i for i, item in enumerate(work[:number]) if isinstance(item, Compute) and item.job == "argtopk"]
    return decisions[-1:]


SCHEDULES: dict[str, Callable[[Work, Units, Stopwatch], None]] = {"serial": serial, "overlapped": overlapped}
