"""Scheduling of a step's reads and arithmetic in simulated time, serially or overlapped per stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from attention_engine import Compute, EngineClock, Read
from csd_firmware.latency import LatencyBreakdown
from csd_firmware.trace import CommandTrace, Segment
from csd_spec.arrays import I64
from ftl import Ftl, ReadStage, StageTracer, UnitStage

Work = Sequence[Read | Compute]
MAX_JOBS = 256
SMALL_SUM_LIMIT = 64
POOLS = ("argtopk", "kernel")  # unit pools of the engine


@dataclass(frozen=True, slots=True)
class StepResources:
    """Resources of a step: the flash with its filters, and the engine."""

    ftl: Ftl
    clock: EngineClock

    def compute(self, item: Compute) -> tuple[int, int]:
        """Time of a unit for all streams, and additional softmax time, ns; each stream is shared among all kernels."""
        length = self._length(item)
        lines = _total(item.lines)
        load = lines * length if isinstance(length, int) else _total(item.lines * length)
        ns, softmax_ns = self._ns(item, load, lines if item.scores is item.lines else _total(item.scores))
        share = self.clock.spec.kernels if item.job == "kernel" else 1
        return -(-ns // share), -(-softmax_ns // share)

    def divide(self, item: Compute, bounds: I64) -> tuple[list[int], list[int]]:
        """The times of `compute`, divided between streams bounds[j] to bounds[j + 1] (exclusive), for each j."""
        ns, softmax_ns = self.compute(item)
        return _divide(ns, self._load(item), bounds), _divide(softmax_ns, item.scores, bounds)

    def _load(self, item: Compute) -> I64:
        """Load per stream, (N,): values for argtopk, or kernel cycles per query."""
        return item.lines * self._length(item)

    def _length(self, item: Compute) -> I64 | int:
        """Load per line."""
        return item.length if item.job == "argtopk" else -(-item.length // self.clock.spec.lanes)

    def _ns(self, item: Compute, load: int, scores: int) -> tuple[int, int]:
        if item.job == "argtopk":
            return self.clock.topk_ns(load), 0
        return _kernel_ns(self.clock, load * item.queries, scores * item.queries)


@lru_cache(1 << 10)
def _kernel_ns(clock: EngineClock, beats: int, scores: int) -> tuple[int, int]:
    """Time of a kernel, and additional softmax time, ns; cached because layers of a step mostly have equal work."""
    ns = clock.kernel_ns(beats)
    return ns, max(0, clock.softmax_ns(scores) - ns)


def _total(values: I64) -> int:
    """Sum of values (N,); a Python sum is 4x faster for few values."""
    return sum(values.tolist()) if values.size < SMALL_SUM_LIMIT else int(values.sum())


def _divide(ns: int, loads: I64, bounds: I64) -> list[int]:
    """Divide a time in proportion to loads (N,), for bounds[j] to bounds[j + 1] (exclusive); the parts sum to `ns`."""
    until = np.zeros(loads.size + 1, np.int64)
    np.cumsum(loads, out=until[1:])
    ends = [ns * load // max(1, int(until[-1])) for load in until[bounds].tolist()]
    return [end - begin for begin, end in pairwise(ends)]


def serial(work: Work, units: StepResources, watch: LatencyBreakdown) -> None:
    """Run one phase for all streams after the other, sharing each among kernels: matches the paper's figures."""
    for item in work:
        if isinstance(item, Read):
            programs_ns = units.ftl.programs_end_ns([item.plan], watch.now_ns)
            _read(watch, item.unit, units.ftl.read(item.plan, watch.now_ns), programs_ns)
        else:
            ns, softmax_ns = units.compute(item)
            watch.spend(item.unit, ns)
            watch.spend("softmax", softmax_ns)


def overlapped(work: Work, units: StepResources, watch: LatencyBreakdown) -> None:
    """Run every stream independently: flash reads of one overlap the arithmetic of others, V reads overlap logits.

    A read waits for the last argtopk before it, compute for all earlier items. Units take the earliest ready item. The
    breakdown is that of the critical path of the last stream. More than MAX_JOBS streams are bundled with neighbours.
    """
    if not work:
        return
    streams = max(map(_streams, work))
    size = -(-streams // MAX_JOBS)
    cuts, stages = np.minimum(np.arange(-(-streams // size) + 1) * size, streams), list[ReadStage | UnitStage]()
    for number, item in enumerate(work):  # items may have one stream per query head
        bounds, after = cuts * _streams(item) // streams, _waits_for(work, number)
        if isinstance(item, Read):
            stages.append(ReadStage(after, item.plan, bounds))
        else:
            stages.append(UnitStage(after, POOLS.index(item.job), *units.divide(item, bounds)))
    plans = [item.plan for item in work if isinstance(item, Read)]
    programs_ns = units.ftl.programs_end_ns(plans, watch.now_ns) if plans else watch.now_ns
    trace = _unit_tracer(watch.trace, work) if watch.trace else None
    for link in units.ftl.pipeline(stages, (1, 1), watch.now_ns, trace):
        item = work[link.stage]
        if isinstance(item, Read):
            _read(watch, item.unit, link.finish_ns, programs_ns)
        else:
            watch.until("softmax" if link.tail else item.unit, link.finish_ns)


def _unit_tracer(trace: CommandTrace, work: Work) -> StageTracer:
    """Function that adds a unit's time to a trace."""

    def add(stage: int, begin_ns: int, end_ns: int, tail: bool) -> None:
        item = work[stage]
        trace.units.append(Segment("softmax" if tail else item.unit, begin_ns, end_ns))

    return add


def _read(watch: LatencyBreakdown, unit: str, finish_ns: int, programs_ns: int) -> None:
    """Record a read; waiting for programs on its lanes is accounted to flash_program."""
    if programs_ns > watch.now_ns:
        watch.until("flash_program", min(programs_ns, finish_ns))
    watch.until(unit, finish_ns)


def _streams(item: Read | Compute) -> int:
    return item.lines.size if isinstance(item, Compute) else item.plan.ends.size


def _waits_for(work: Work, number: int) -> list[int]:
    """Earlier items that an item depends on."""
    if isinstance(work[number], Compute):
        return list(range(number))
    decisions = [i for i, item in enumerate(work[:number]) if isinstance(item, Compute) and item.job == "argtopk"]
    return decisions[-1:]


SCHEDULES: dict[str, Callable[[Work, StepResources, LatencyBreakdown], None]] = {
    "serial": serial,
    "overlapped": overlapped,
}
