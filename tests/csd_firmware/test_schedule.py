"""Schedules against times computed by hand and against bounds that no schedule can beat."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_engine import Compute, EngineClock, Read
from csd_firmware.latency import LatencyBreakdown
from csd_firmware.schedule import SCHEDULES, StepResources
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from ftl import Ftl, PagePlan
from tests.csd_firmware.test_step import Bench, with_schedule
from tests.properties import examples

READ, CHANNEL = 50_000, 366  # of one page of 512 bytes at 1.4 GB/s


def units_of(drive, **engine):
    engine = {"clock_hz": 1_000_000_000, "kernels": 2, "lanes": 1, "kernel_efficiency": 1.0, **engine}
    ftl = Ftl(replace(drive, engine=replace(drive.engine, **engine)))
    return StepResources(ftl, EngineClock(ftl.spec.engine))


def pages(*per_stream):
    """A plan with the given number of pages for each stream, assigned cyclically to lanes."""
    ends = np.cumsum(per_stream)
    size = np.full(ends[-1], 512)
    return PagePlan(np.arange(ends[-1], dtype=np.uint32) % np.uint32(4), size, size, ends, stored=False)


def kernel(unit, *beats, scores=None):
    lines = np.array(beats)
    return Compute(unit, "kernel", lines, np.ones_like(lines), 1, 0 * lines if scores is None else np.array(scores))


def argtopk(*values):
    lengths = np.array(values)
    return Compute("argtopk", "argtopk", np.ones_like(lengths), lengths, 1, 0 * lengths)


def run(schedule, work, units):
    watch = LatencyBreakdown(1000)
    SCHEDULES[schedule](work, units, watch)
    assert sum(watch.breakdown_ns.values()) == watch.now_ns - 1000
    return watch.now_ns - 1000, {unit: ns for unit, ns in watch.breakdown_ns.items() if ns}


def test_serial_schedule_adds_phases(small_drive):
    work = [kernel("logit", 300, 500), argtopk(32, 32), kernel("attend", 7, 0)]
    total, parts = run("serial", work, units_of(small_drive))
    assert parts == {"logit": 400, "argtopk": 6, "attend": 4}
    assert total == 410


def test_each_stream_is_shared_among_all_kernels(small_drive):
    """As in the serial schedule, so no kernel idles while fewer streams than kernels are left."""
    for beats in ((300, 500, 400), (1200,), (0, 1199)):
        total, parts = run("overlapped", [kernel("logit", *beats)], units_of(small_drive))
        assert (total, parts) == (600, {"logit": 600})


def test_reads_of_v_overlap_logits_of_k(small_drive):
    work = [
        argtopk(32),
        Read("flash_embed", pages(1)),
        kernel("logit", 40_000),
        Read("flash_table", pages(1)),
        kernel("attend", 10),
    ]
    units = units_of(small_drive)
    total, parts = run("overlapped", work, units)
    # Both pages are on one lane: V is sensed after the transfer of K, and arrives after logit has finished
    assert total == pytest.approx(3 + 2 * (READ + CHANNEL) + 5, abs=10)
    assert parts == {"argtopk": 3, "flash_table": total - 8, "attend": 5}
    serial, _ = run("serial", work, units_of(small_drive))
    assert serial == pytest.approx(3 + 2 * (READ + CHANNEL) + 20_000 + 5, abs=10)  # both kernels


def test_flash_time_hidden_under_other_streams_compute(small_drive):
    work = [Read("flash_embed", pages(4, 4)), kernel("logit", 90_000, 90_000)]
    total, parts = run("overlapped", work, units_of(small_drive, kernels=1))
    first = READ + 2 * CHANNEL
    assert total == pytest.approx(first + 180_000, rel=0.01)
    assert parts["logit"] == 180_000


def test_slow_softmax_limits_its_kernel(small_drive):
    units = units_of(small_drive, softmax_ways=1)
    for schedule in SCHEDULES:
        _, parts = run(schedule, [kernel("logit0", 100, 100, scores=[160, 160])], units)
        assert parts == {"logit0": 100, "softmax": 60}


def test_slow_filter_limits_its_channel(small_drive):
    """At 0.01 bytes a ns, 200 pages on each of two channels, for any assignment to streams."""
    for schedule in SCHEDULES:
        for streams in (1, 8):
            slow = units_of(small_drive, nfc_bytes_per_cycle=1, clock_hz=10_000_000)
            total, _ = run(schedule, [Read("flash_embed", pages(*[400 // streams] * streams))], slow)
            assert total == pytest.approx(200 * 512 * 100 + READ, rel=0.02)


def test_work_per_stream_and_per_query_head_may_be_mixed(small_drive):
    work = [
        kernel("logit0", 100, 100),
        argtopk(1, 1, 1, 1),
        Read("flash_embed", pages(1, 1, 1, 1)),
        kernel("logit", 10, 10, 10, 10),
    ]
    for schedule in SCHEDULES:
        _, parts = run(schedule, work, units_of(small_drive))
        assert sum(ns for unit, ns in parts.items() if unit == "logit0") >= 100
    assert run("overlapped", [], units_of(small_drive)) == (0, {})


@pytest.mark.parametrize("seed", range(20))
def test_schedule_is_never_shorter_than_busiest_unit(small_drive, seed):
    generator = np.random.default_rng(seed)
    streams = int(generator.integers(1, 9))

    def some(most):
        return generator.integers(0, most, streams)

    work = [
        argtopk(*some(100)),
        Read("flash_embed", pages(*some(5) + 1)),
        kernel("logit0", *some(30_000), scores=some(90_000)),
        argtopk(*some(100_000)),
        Read("flash_token", pages(*some(5) + 1)),
        kernel("logit", *some(30_000)),
        Read("flash_token", pages(*some(5) + 1)),
        kernel("attend", *some(30_000)),
    ]
    (serial, _), (overlapped, _) = (run(name, work, units_of(small_drive)) for name in ("serial", "overlapped"))
    units = units_of(small_drive)
    kernels = [item for item in work if isinstance(item, Compute) and item.job == "kernel"]
    arithmetic = sum(sum(units.compute(item)) for item in kernels)
    assert arithmetic <= overlapped <= serial
    for item in kernels:
        for parts, whole in zip(units.divide(item, np.arange(streams + 1)), units.compute(item), strict=True):
            assert sum(parts) == whole and min(parts) >= 0


def test_many_streams_are_scheduled_in_bundles(small_drive):
    """A thousand equal jobs on two kernels take as long as all their cycles over two, but for a bundle's."""
    total, parts = run("overlapped", [kernel("logit", *[300] * 1000)], units_of(small_drive))
    assert parts == {"logit": total}
    assert total == 150_000


CHOICES = {  # any of lanes, channels, filters, kernels, softmax and argtopk may be the bottleneck
    "geometry": {
        "channels": (1, 2, 4, 8),
        "dies_per_channel": (1, 2, 4),
        "planes_per_die": (1, 2),
        "blocks_per_plane": (64,),
        "pages_per_block": (32,),
        "page_bytes": (512, 4096),
    },
    "timing": {
        "read_ns": (1000, 10_000, 50_000),
        "channel_bytes_per_s": (100_000_000, 1_400_000_000),
        "cache_read": (False, True),
    },
    "engine": {
        "kernels": (1, 2, 3, 8, 16),
        "lanes": (1, 4, 64),
        "softmax_ways": (1, 4, 32),
        "topk_ways": (1, 32),
        "nfc_bytes_per_cycle": (1, 8),
        "clock_hz": (10_000_000, 285_000_000, 1_000_000_000),
    },
}
drives = st.fixed_dictionaries(
    {
        part: st.fixed_dictionaries({name: st.sampled_from(values) for name, values in fields.items()})
        for part, fields in CHOICES.items()
    }
).map(
    lambda drawn: replace(
        INSTCSD_ZYNQ7045_8CH,
        name="random",
        dram_bytes=1 << 24,
        **{part: replace(getattr(INSTCSD_ZYNQ7045_8CH, part), **fields) for part, fields in drawn.items()},
    )
)
batches = st.lists(st.integers(1, 600), min_size=1, max_size=6)


@settings(max_examples=examples(200))
@given(drives, batches, st.sampled_from(["dense", "sparf", "sparq"]), st.integers(0, 1 << 16))
def test_overlapped_step_is_never_longer_than_serial(drive, lengths, method, seed):
    took = {}
    for schedule in SCHEDULES:
        bench = Bench(with_schedule(drive, schedule), lengths, seed)
        took[schedule] = [bench.attend(method, now_ns=ns)[0].latency_ns for ns in (10**9, 2 * 10**9)]
    assert (np.array(took["overlapped"]) <= took["serial"]).all(), took
