"""The block namespace against an array of bytes."""

import heapq
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csd_firmware import Firmware
from csd_firmware.namespace import BUFFER_PAGES, Namespace
from csd_firmware.values import Values
from csd_spec import Flush, Geometry, KvAppend, KvRead, SeqCreate, Status
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from tests.properties import examples

GEOMETRY = Geometry(
    channels=2, dies_per_channel=2, planes_per_die=1, blocks_per_plane=64, pages_per_block=16, page_bytes=512
)
SMALL = replace(INSTCSD_ZYNQ7045_8CH, name="small", geometry=GEOMETRY, dram_bytes=1 << 20)

operations = st.lists(
    st.tuples(
        st.sampled_from(["read", "write", "write", "flush", "discard", "power"]),
        st.integers(0, 70_000),
        st.integers(0, 20_000),
    ),
    max_size=25,
)


@settings(max_examples=examples(60))
@given(operations, st.integers(0, 255))
def test_random_writes_read_back_last_value(steps, seed):
    firmware = Firmware(SMALL)
    namespace = Namespace(firmware, threading.Lock())
    model = bytearray(namespace.size_bytes)
    generator = np.random.default_rng(seed)
    for verb, offset, size in steps:
        if verb == "write":
            data = generator.bytes(size)
            done, _ = namespace.write(offset, data)
            assert done == max(0, min(size, len(model) - offset))
            model[offset : offset + done] = data[:done]
        elif verb == "read":
            assert namespace.read(offset, size)[0] == model[offset : offset + size]
        elif verb == "discard":
            namespace.discard(offset, size)
            model[offset : offset + size] = bytes(max(0, min(size, len(model) - offset)))
        else:
            namespace.flush()
            if verb == "power":
                firmware.ftl.nand.power_on()
                firmware = Firmware(SMALL, firmware.ftl.nand)
                namespace = Namespace(firmware, threading.Lock())
    assert namespace.read(0, len(model))[0] == model
    reads = namespace.latency["read"]
    assert reads.total_ns >= reads.requests * SMALL.link.command_ns


def test_power_loss_keeps_flushed_blocks():
    firmware = Firmware(SMALL)
    namespace = Namespace(firmware, threading.Lock())
    namespace.write(100, b"flushed" * 1000)
    namespace.flush()
    namespace.write(100, b"not")
    again = Namespace(Firmware(SMALL, firmware.ftl.nand), threading.Lock())
    assert again.size_bytes == namespace.size_bytes
    assert again.read(100, 7000)[0] == b"flushed" * 1000


def test_power_loss_keeps_flushed_counters():
    firmware = Firmware(SMALL)
    namespace = Namespace(firmware, threading.Lock())
    for number in range(700):
        namespace.write(512 * (number % 50), b"x" * 512)
        namespace.flush()
    before, journal = firmware.ftl.counters, firmware.ftl.counters.journal
    namespace.flush()
    assert before.journal == journal, "an idle flush writes nothing"
    assert journal == 2 * 700, "any other names what it acknowledges, in two places"
    firmware.ftl.nand.power_on()
    after = Firmware(SMALL, firmware.ftl.nand).ftl.counters
    assert after.blocks == before.blocks == 700
    assert after.host_writes == 700


KIB = 1 << 10


def filled(spec, nbytes):
    """A namespace that holds `nbytes` bytes and is idle, and the simulated time at which it is idle, ns."""
    firmware = Firmware(spec)
    namespace = Namespace(firmware, threading.Lock())
    for at in range(0, nbytes, 256 * KIB):
        namespace.write(at, np.random.default_rng(at).bytes(256 * KIB))
    namespace.flush()
    return namespace, firmware.ftl.timing.idle_ns()


def closed_loop(namespace, start_ns, nbytes, depth):
    """Sequential reads of 256 KiB with `depth` in flight; modelled bytes a second."""
    flying, end_ns = [start_ns] * depth, start_ns
    for at in range(0, nbytes, 256 * KIB):
        data, end_ns = namespace.read(at, 256 * KIB, heapq.heappop(flying))
        assert data == np.random.default_rng(at).bytes(256 * KIB)
        heapq.heappush(flying, end_ns)
    return nbytes * 1e9 / (max(flying) - start_ns)


def test_concurrent_reads_overlap_flash_share_link():
    link = replace(INSTCSD_ZYNQ7045_8CH.link, bytes_per_s=8_000_000_000)
    spec = replace(INSTCSD_ZYNQ7045_8CH, link=link)
    one, four, many = (closed_loop(*filled(spec, 8 << 20), 8 << 20, depth) for depth in (1, 4, 32))
    assert 2 * one < four <= many * 1.01
    assert 0.9 * link.bytes_per_s < many <= link.bytes_per_s


def test_requests_without_time_are_submitted_at_the_clock():
    (namespace, now_ns), (other, _) = (filled(INSTCSD_ZYNQ7045_8CH, 1 << 20) for _ in range(2))
    for at in range(0, 1 << 20, 96 * KIB):
        _, now_ns = namespace.read(at, 96 * KIB, now_ns)
        assert other.read(at, 96 * KIB)[1] == other._firmware.now_ns == now_ns
    assert namespace.latency["read"].to_dict() == other.latency["read"].to_dict()


def test_write_waits_if_program_buffer_is_full():
    namespace = Namespace(
        Firmware(replace(INSTCSD_ZYNQ7045_8CH, link=replace(INSTCSD_ZYNQ7045_8CH.link, bytes_per_s=10**12))),
        threading.Lock(),
    )
    took = [namespace.write(at, bytes(256 * KIB), 0)[1] for at in range(0, 32 << 20, 256 * KIB)]
    room = BUFFER_PAGES * namespace.page_bytes // (256 * KIB)
    assert took[room - 1] < 100_000 < took[-1]
    assert took == sorted(took)
    programs = namespace._firmware.ftl.timing.idle_ns()
    assert programs * 0.8 < took[-1] < programs


def test_requests_that_overlap_are_not_busy_twice():
    namespace, start_ns = filled(INSTCSD_ZYNQ7045_8CH, 1 << 20)
    busy = namespace._firmware.ftl.counters.busy_ns
    ends = [namespace.read(at, 256 * KIB, start_ns)[1] for at in range(0, 1 << 20, 256 * KIB)]
    assert namespace._firmware.ftl.counters.busy_ns - busy == max(ends) - start_ns


def test_discarded_range_frees_namespace_space():
    namespace, _ = filled(INSTCSD_ZYNQ7045_8CH, 1 << 20)
    free = namespace.free_bytes
    namespace.discard(100, (1 << 20) - 200)
    page = namespace.page_bytes
    assert namespace.free_bytes == free + (1 << 20) - 2 * page
    assert namespace.read(0, 200)[0] == np.random.default_rng(0).bytes(100) + bytes(100)
    assert namespace.latency["discard"].nbytes == (1 << 20) - 200


def test_discard_of_whole_pages_is_one_command():
    namespace = Namespace(Firmware(SMALL), threading.Lock())
    for _ in range(3):
        namespace.discard(1024, 5120)
    took = namespace.latency["discard"]
    assert (took.requests, took.total_ns) == (3, 3 * SMALL.link.command_ns)


def overwritten(spec, share, passes, monkeypatch, flushes):
    """MB/s of random overwrites of 4 KiB of a namespace of `share` of the flash, times the write amplification."""
    monkeypatch.setattr("csd_firmware.namespace.namespace_pages", lambda ftl: int(share * spec.geometry.pages))
    firmware = Firmware(spec)
    namespace = Namespace(firmware, threading.Lock())
    pages, page = namespace.size_bytes // namespace.page_bytes, namespace.page_bytes
    for at in range(0, pages - 31, 32):
        namespace.write(at * page, bytes(32 * page))
    if flushes:
        namespace.flush()
    counters, start_ns = firmware.ftl.counters, firmware.now_ns
    before = counters.data, counters.data + counters.journal + counters.moved
    for number in np.random.default_rng(0).integers(0, pages - 31, passes * pages).tolist():
        namespace.write(number * page, bytes(page))
    data, programs = counters.data - before[0], counters.data + counters.journal + counters.moved - before[1]
    return passes * pages * page / (firmware.now_ns - start_ns) * 1e3 * programs / data, namespace


def eight_lanes(**geometry):
    """A drive of 8 lanes that programs 54.6 MB/s."""
    spec = replace(INSTCSD_ZYNQ7045_8CH, name="eight", dram_bytes=1 << 24)
    timing = replace(spec.timing, program_ns=600_000, erase_ns=3_000_000)
    lanes = {"channels": 8, "dies_per_channel": 1, "planes_per_die": 1, "page_bytes": 4096}
    return replace(spec, timing=timing, geometry=Geometry(**lanes, **geometry))


@pytest.mark.parametrize("flushes", [True, False])
def test_random_overwrites_take_the_time_of_their_programs(monkeypatch, flushes):
    """Within 5 %: erases, and the reads of garbage collection. Without a flush nothing else begins the journal."""
    spec = eight_lanes(blocks_per_plane=32, pages_per_block=128)
    mb_s, namespace = overwritten(spec, 1 / 4, 4, monkeypatch, flushes)
    assert mb_s == pytest.approx(8 * 4096 / 600_000 * 1e3, rel=0.05)
    latency = namespace.latency["write"]
    assert latency.percentile_ns(99) >= 3_000_000 > latency.percentile_ns(50)


def test_garbage_collection_delays_writes(monkeypatch):
    spec = eight_lanes(blocks_per_plane=64, pages_per_block=32)
    _, little = overwritten(spec, 1 / 4, 2, monkeypatch, True)
    _, much = overwritten(spec, 0.6, 2, monkeypatch, True)
    assert much._firmware.ftl.counters.moved > 20 * little._firmware.ftl.counters.moved
    means = [namespace.latency["write"].to_dict()["mean_ns"] for namespace in (little, much)]
    assert means[1] > 1.3 * means[0]


def test_flush_ends_after_programs():
    namespace = Namespace(Firmware(SMALL), threading.Lock())
    _, now_ns = namespace.write(0, bytes(20 * 512))
    assert now_ns < 100_000
    assert namespace.flush() == namespace._firmware.ftl.timing.idle_ns() >= now_ns + SMALL.timing.program_ns


def test_one_clock_for_blocks_values_and_commands():
    firmware = Firmware(SMALL)
    namespace, values = Namespace(firmware, threading.Lock()), Values(firmware)
    times = [firmware.now_ns]
    for request in (
        lambda: namespace.write(0, bytes(4096)),
        lambda: values.store(b"key", bytes(4096)),
        lambda: namespace.read(0, 4096),
        lambda: values.retrieve(b"key"),
        lambda: firmware.step(Flush(), firmware.now_ns),
        lambda: namespace.discard(0, 4096),
        namespace.flush,
        lambda: Values(firmware, "other").store(b"key", bytes(512)),
    ):
        request()
        times.append(firmware.now_ns)
    assert (np.diff(times) >= SMALL.link.command_ns).all()
    assert firmware.ftl.counters.busy_ns == times[-1], "nothing overlapped, and nothing waited for anything"


def test_blocks_wait_for_flash_and_link_of_commands():
    firmware = Firmware(SMALL)
    namespace = Namespace(firmware, threading.Lock())
    namespace.write(0, bytes(8 * 512))
    start_ns = namespace.flush() + 1_000_000
    alone_ns = namespace.read(0, 8 * 512, start_ns)[1] - start_ns
    (seq,) = firmware.step(SeqCreate(1, 1, 2, 16, 2048), start_ns).data[0].tolist()
    rows = np.zeros((2048, 2, 16), np.float16)
    start_ns += 10_000_000
    stored = firmware.step(KvAppend((seq,), 0, np.array([2048]), rows, rows), start_ns)
    assert stored.status is Status.SUCCESS
    assert namespace.read(0, 8 * 512, start_ns)[1] - start_ns > alone_ns + SMALL.timing.program_ns
    start_ns = firmware.now_ns + 10_000_000
    read = firmware.step(KvRead((seq,), 0), start_ns)
    took_ns = namespace.read(0, 512, read.finish_ns - 1 - SMALL.link.command_ns)[1] - read.finish_ns
    assert took_ns >= SMALL.link.transfer_ns(512)
