"""When a step's work is done: its pages and its arithmetic, one after the other or each head as soon as it can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from attention_engine import Compute, EngineClock, Read
from csd_firmware.stopwatch import Stopwatch
from csd_spec.arrays import I64
from ftl import Ftl, ReadStage, UnitStage

Work = Sequence[Read | Compute]
MAX_JOBS = 256
FEW = 64
POOLS = ("argtopk", "kernel")  # of the engine's units


@dataclass(frozen=True, slots=True)
class Units:
    """What works on a step: the flash with its filters, and the engine."""

    ftl: Ftl
    clock: EngineClock

    def compute(self, item: Compute, bounds: I64) -> tuple[list[int], list[int]]:
        """Nanoseconds of a unit for the streams from bounds[j] to before bounds[j + 1], and those that softmax takes
        beyond it, for each j; one kernel's worth."""
        loads = list(zip(_between(self._load(item), bounds), _between(item.scores, bounds), strict=True))
        taken = {load: self._ns(item, *load) for load in set(loads)}  # many jobs are alike
        ns, softmax_ns = zip(*(taken[load] for load in loads), strict=True)
        return list(ns), list(softmax_ns)

    def whole(self, item: Compute) -> tuple[int, int]:
        """The same for all streams together."""
        length = self._length(item)
        lines = _total(item.lines)
        load = lines * length if isinstance(length, int) else _total(item.lines * length)
        return self._ns(item, load, lines if item.scores is item.lines else _total(item.scores))

    def _load(self, item: Compute) -> I64:
        """Values of each stream that argtopk takes, or beats of a kernel for each query, (N,)."""
        return item.lines * self._length(item)

    def _length(self, item: Compute) -> I64 | int:
        """What a line takes of that."""
        return item.length if item.job == "argtopk" else -(-item.length // self.clock.spec.lanes)

    def _ns(self, item: Compute, load: int, scores: int) -> tuple[int, int]:
        if item.job == "argtopk":
            return self.clock.topk_ns(load), 0
        return _kernel_ns(self.clock, load * item.queries, scores * item.queries)


@lru_cache(1 << 10)
def _kernel_ns(clock: EngineClock, beats: int, scores: int) -> tuple[int, int]:
    """Of a kernel, and what its softmax takes beyond that; layers of a step mostly have the same work."""
    ns = clock.kernel_ns(beats)
    return ns, max(0, clock.softmax_ns(scores) - ns)


def _total(values: I64) -> int:
    """The sum of values (N,): of a few by themselves, in a quarter of the time."""
    return sum(values.tolist()) if values.size < FEW else int(values.sum())


def _between(values: I64, bounds: I64) -> list[int]:
    """Sums of values (N,) from bounds[j] to before bounds[j + 1]."""
    until = np.zeros(values.size + 1, np.int64)
    np.cumsum(values, out=until[1:])
    sums: list[int] = np.diff(until[bounds]).tolist()
    return sums


def serial(work: Work, units: Units, watch: Stopwatch) -> None:
    """One phase of all streams after the other, kernels share each by load: the reading of the paper's figures."""
    for item in work:
        if isinstance(item, Read):
            programs_ns = units.ftl.programs_end_ns([item.plan], watch.now_ns)
            _read(watch, item.unit, units.ftl.read(item.plan, watch.now_ns), programs_ns)
        else:
            ns, softmax_ns = units.whole(item)
            share = units.clock.spec.kernels if item.job == "kernel" else 1
            watch.spend(item.unit, -(-ns // share))
            watch.spend("softmax", -(-softmax_ns // share))


def overlapped(work: Work, units: Units, watch: Stopwatch) -> None:
    """Every stream by itself: flash of one under the arithmetic of another, V under the logits of K.

    A read waits for the last argtopk before it, a unit for all that came before. Units take first what is ready first.
    The nanoseconds are those of the chain of waits at whose end the last stream ends. More than MAX_JOBS streams go as
    bundles of neighbours.
    """
    if not work:
        return
    streams = max(map(_streams, work))
    size = -(-streams // MAX_JOBS)
    cuts, stages = np.minimum(np.arange(-(-streams // size) + 1) * size, streams), list[ReadStage | UnitStage]()
    for number, item in enumerate(work):  # a query head may have become a stream of its own
        bounds, after = cuts * _streams(item) // streams, _waits_for(work, number)
        if isinstance(item, Read):
            stages.append(ReadStage(after, item.plan, bounds))
        else:
            stages.append(UnitStage(after, POOLS.index(item.job), *units.compute(item, bounds)))
    plans = [item.plan for item in work if isinstance(item, Read)]
    programs_ns = units.ftl.programs_end_ns(plans, watch.now_ns) if plans else watch.now_ns
    for link in units.ftl.pipeline(stages, (1, units.clock.spec.kernels), watch.now_ns):
        item = work[link.stage]
        if isinstance(item, Read):
            _read(watch, item.unit, link.finish_ns, programs_ns)
        else:
            watch.until("softmax" if link.tail else item.unit, link.finish_ns)


def _read(watch: Stopwatch, unit: str, finish_ns: int, programs_ns: int) -> None:
    """A read has ended. Until the last lane that it needs was free of programs its time counts as waiting for those."""
    if programs_ns > watch.now_ns:
        watch.until("flash_program", min(programs_ns, finish_ns))
    watch.until(unit, finish_ns)


def _streams(item: Read | Compute) -> int:
    return item.lines.size if isinstance(item, Compute) else item.plan.ends.size


def _waits_for(work: Work, number: int) -> list[int]:
    """Earlier items that one has to wait for."""
    if isinstance(work[number], Compute):
        return list(range(number))
    decisions = [i for i, item in enumerate(work[:number]) if isinstance(item, Compute) and item.job == "argtopk"]
    return decisions[-1:]


SCHEDULES: dict[str, Callable[[Work, Units, Stopwatch], None]] = {"serial": serial, "overlapped": overlapped}
