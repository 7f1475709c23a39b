"""Reads between the work of units, against a plain heap of ready work."""

from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from csd_spec import Geometry
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from ftl import CriticalStage, FaultPlan, Ftl, Nand, PagePlan, ReadStage, UncorrectableReadError, UnitStage

START_NS = 1000


@dataclass
class Done:
    """A finished stage of a job, or its tail: its end time, and the stage that directly precedes it."""

    link: CriticalStage
    cause: "Done | None"

    @property
    def ns(self):
        return self.link.finish_ns


def plain(store, stages, pools, start_ns):
    """The same with a heap and a dictionary, one read of the flash store after the other."""
    start = Done(CriticalStage(-1, False, start_ns), None)
    jobs = next(len(stage.ns) if isinstance(stage, UnitStage) else stage.bounds.size - 1 for stage in stages)
    users = [[start] * count for count in pools]
    ready, done = [], {}
    for job in range(jobs):
        for number, each in enumerate(stages):
            if not each.after:
                heappush(ready, (start_ns, job, number))
    while ready:
        now_ns, job, number = heappop(ready)
        each = stages[number]
        cause = max((done[job, earlier] for earlier in sorted(each.after)), key=lambda one: one.ns, default=start)
        if isinstance(each, ReadStage):
            part = each.plan.part(int(each.bounds[job]), int(each.bounds[job + 1]))
            end = Done(CriticalStage(number, False, store.read(part, now_ns)), cause)
        else:
            pool = users[each.pool]
            free = min(range(len(pool)), key=lambda one: pool[one].ns)
            cause = max(cause, pool[free], key=lambda one: one.ns)
            end = Done(CriticalStage(number, False, cause.ns + int(each.ns[job])), cause)
            if each.tail_ns[job]:
                end = Done(CriticalStage(number, True, end.ns + int(each.tail_ns[job])), end)
            pool[free] = end
        done[job, number] = end
        for later in range(number + 1, len(stages)):
            after = stages[later].after
            if number in after and all((job, earlier) in done for earlier in after):
                heappush(ready, (max(done[job, earlier].ns for earlier in after), job, later))
    chain, end = [], max(done.values(), key=lambda one: one.ns)
    while end.cause:
        chain.append(end.link)
        end = end.cause
    return chain[::-1]


@st.composite
def drives(draw):
    """A small drive with some channels, dies, planes and rates."""
    few = st.integers(1, 3)
    geometry = Geometry(
        channels=draw(st.integers(1, 9)),
        dies_per_channel=draw(few),
        planes_per_die=draw(few),
        blocks_per_plane=16,
        pages_per_block=8,
        page_bytes=512,
    )
    timing = replace(
        INSTCSD_ZYNQ7045_8CH.timing,
        channel_bytes_per_s=draw(st.sampled_from([10**7, 1_400_000_000])),
        cache_read=draw(st.booleans()),
        read_ns=draw(st.sampled_from([1000, 3000, 50_000])),
    )
    return replace(INSTCSD_ZYNQ7045_8CH, geometry=geometry, timing=timing, dram_bytes=1 << 20)


@st.composite
def work(draw, lanes):
    """Stages of some jobs, and pools: any stage may wait for any before it; times so short that many are equal."""
    jobs, pools = draw(st.integers(1, 12)), draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    generator = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    longest, stages = draw(st.sampled_from([2, 5000, 100_000])), []
    for number in range(draw(st.integers(1, 9))):
        after = [earlier for earlier in range(number) if draw(st.booleans())]
        if draw(st.booleans()):
            ns, tail_ns = generator.integers(0, longest, (2, jobs)) * generator.integers(0, 2, (2, jobs))
            stages.append(UnitStage(after, draw(st.integers(0, len(pools) - 1)), ns, tail_ns))
        else:
            streams = draw(st.integers(0, 2 * jobs))
            bounds = np.arange(jobs + 1) * streams // jobs
            ends = np.cumsum(generator.integers(0, 5, streams))
            count = int(ends[-1]) if streams else 0
            nbytes, ppns = generator.integers(1, 513, count), generator.integers(0, lanes, count).astype(np.uint32)
            stages.append(ReadStage(after, PagePlan(ppns, nbytes, nbytes, ends, stored=False), bounds))
    return stages, pools


@given(st.data())
def test_pipeline_times_equal_heap_simulation(data):
    """To the nanosecond, with all reads inside the loop and with each one asked for; and so are later reads."""
    spec = data.draw(drives())
    stages, pools = data.draw(work(spec.geometry.lanes))
    drives_alike = [Ftl(spec, Nand(spec.geometry, payload=False)) for _ in range(3)]
    heard = []
    drives_alike[2].timing.listener = lambda *read: heard.append(read)
    for start_ns in (START_NS, 3 * START_NS):  # the second finds lanes and channels busy
        wanted = plain(drives_alike[0].store, stages, pools, start_ns)
        assert [ftl.pipeline(stages, pools, start_ns) for ftl in drives_alike[1:]] == [wanted] * 2
        assert wanted[-1].finish_ns >= start_ns
    first, *others = [(ftl.counters.read, ftl.timing.lane_free.tolist()) for ftl in drives_alike]
    assert others == [first] * 2
    assert sum(len(ppns) for _, ppns, _ in heard) == drives_alike[2].counters.read


def test_uncorrectable_pages_lost_retried_ones_slower(small_drive):
    """The same errors, drawn in the same order."""
    ends = []
    for bits in (1e-9, 4e-3):
        ftls = [Ftl(small_drive, Nand(small_drive.geometry, FaultPlan(raw_bit_errors=bits))) for _ in range(2)]
        for ftl in ftls:
            ftl.nand.next_page[:] = 8
        ppns = np.arange(64, dtype=np.uint32)
        size = np.full(64, 512)
        stages = [ReadStage((), PagePlan(ppns, size, size, np.arange(16, 65, 16)), np.arange(5))]
        wanted = plain(ftls[0].store, stages, [1], 0)
        assert ftls[1].pipeline(stages, [1], 0) == wanted
        ends.append(wanted[-1].finish_ns)
    assert ends[1] > ends[0]
    ftl = Ftl(small_drive, Nand(small_drive.geometry, FaultPlan(raw_bit_errors=0.2)))
    ftl.nand.next_page[:] = 8
    with pytest.raises(UncorrectableReadError):
        ftl.pipeline(stages, [1], 0)
