"""The edge machine: memory left by a limit, bandwidth shared by paths, and rates of the paper's own tables."""

import pytest

from kv_cache import DEVICE, DIRECT, PAGE_CACHE
from tests.eval.papers.dual_blade.setups import paper_setup, small_setup
from vcsd_eval.papers.dual_blade.machine import COPY, DMA, EVICTED, FAULTS, GIB, PRINTED, READ, drives, machine


def test_rates_reproduce_their_source_latencies():
    a, b = drives().values()
    assert a.read == pytest.approx(12.34e9, rel=0.001)
    assert a.write == pytest.approx(6.34e9, rel=0.001)
    assert 527 * 8192 * 32 / b.read == pytest.approx(PRINTED["d12c"] / 1e3)
    assert 527 * 8192 * 32 / a.faulted == pytest.approx(PRINTED["d9c"] / 1e3)
    assert a.behind_ext4().read == pytest.approx(a.read * 340 / 351)
    assert a.behind_ext4().faulted == a.faulted


def test_a_limit_is_shared_with_the_runtime_and_pinned_buffers():
    setup = paper_setup()
    assert setup.final_tokens == 543
    assert setup.cache_bytes(7) == 6 * GIB - setup.layer_bytes(543)
    assert setup.cache_bytes(7) // setup.layer_bytes(543) == 21
    assert setup.cache_bytes(1) == 0
    assert setup.cache_bytes(setup.limit_gib(10**9)) == pytest.approx(10**9, abs=2)


def test_paths_share_the_gpus_link_and_reads_are_hindered_by_it():
    one = machine(paper_setup(), drives()["A"], 0)
    to_device = {place: one.routes[place, DEVICE] for place in (PAGE_CACHE, EVICTED, DIRECT)}
    assert all(path.links[-1] == DMA for path in to_device.values())
    assert to_device[PAGE_CACHE].miss_links == (FAULTS, DMA)
    assert [DMA in one.links[name].contention for name in (READ, COPY, FAULTS)] == [True, True, False]
    read = one.links[READ]
    assert read.bytes_per_s * read.contention[FAULTS] + one.links[FAULTS].bytes_per_s == pytest.approx(read.bytes_per_s)
    assert to_device[DIRECT].block_bytes == 4096
    assert machine(paper_setup(), drives()["B"], 0).routes[DIRECT, DEVICE].block_bytes == 512


def test_prefill_is_compute_bound_decode_memory_bound():
    setup = small_setup()
    weights = setup.model.weight_bytes / 8
    assert setup.work(1, 64).device_ns == pytest.approx(1e9 * (weights + setup.layer_bytes(64)) / 448e9, abs=1)
    seen = 4 * 32 * 128 * setup.batch * 512 * 256
    assert setup.work(512, 512).device_ns == pytest.approx(1e9 * (512 * 2 * weights + seen) / 47.4e12, abs=1)


def test_model_of_one_layer_is_refused():
    with pytest.raises(ValueError, match="model = small: has one layer"):
        small_setup(layers=1)
