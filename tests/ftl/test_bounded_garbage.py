"""Hosts that never flush: memory and disk stay bounded, for blocks, values and sequences."""

from dataclasses import replace

import numpy as np
import pytest

from csd_spec import LAYOUTS
from ftl import Ftl
from ftl.flash import store
from vcsd_eval.verify.crash import bench_crash

PAGES = 64  # that may be invalid beside the valid ones


@pytest.fixture(autouse=True)
def few_pages(monkeypatch, small_drive):
    monkeypatch.setattr(store, "GARBAGE_BYTES", PAGES * small_drive.geometry.page_bytes)


@pytest.fixture
def large_drive(small_drive):
    """A drive that has room for all that is written here, so nothing else has it erased."""
    return replace(small_drive, geometry=replace(small_drive.geometry, blocks_per_plane=4000))


def rewrite_blocks(ftl, generator):
    ftl.blocks.resize(60)
    while True:
        lpns = generator.choice(40, 5, replace=False)
        ftl.blocks.write(lpns, np.zeros((5, ftl.spec.geometry.page_bytes), np.uint8), 0)
        yield


def rewrite_values(ftl, generator):
    old = None
    while True:
        handle, _ = ftl.store_value(0, b"key", bytes(3 * ftl.spec.geometry.page_bytes), 0)
        if old is not None:
            ftl.free([old], 0)
        old = handle
        yield


def rewrite_sequences(ftl, generator):
    form = LAYOUTS["fp16"].paged(ftl.spec.geometry.page_bytes, 16, 8)
    kv = np.ones((64, 1, 16), np.float16)
    while True:
        (handle,) = ftl.create(1, 1, 1, form)
        ftl.append([handle], 0, np.array([64]), kv, kv, 0)
        yield
        ftl.crop(handle, 0, int(generator.integers(64)), 0)
        ftl.free([handle], 0)


@pytest.mark.parametrize("rewrite", [rewrite_blocks, rewrite_values, rewrite_sequences])
def test_overwritten_data_stays_bounded_without_a_flush(large_drive, rewrite):
    ftl, largest = Ftl(large_drive), 0
    steps = rewrite(ftl, np.random.default_rng(0))
    most_between_checks = 0
    for _ in range(600):
        before = ftl.nand.writes
        next(steps)
        most_between_checks = max(most_between_checks, ftl.nand.writes - before)
        valid = int(ftl.placement.valid.sum())
        largest = max(largest, int(ftl.nand.next_page.sum()) - 2 * valid)
    assert largest <= PAGES * 3 // 2 + most_between_checks + large_drive.geometry.lanes
    assert ftl.nand.erase_count.sum() > 10


def test_freed_sequences_are_recorded_without_a_flush(small_drive, monkeypatch):
    monkeypatch.setattr("ftl.facade.UNRECORDED", 100)
    ftl, form = Ftl(small_drive), LAYOUTS["fp16"].paged(small_drive.geometry.page_bytes, 16, 8)
    for _ in range(1000):
        ftl.free(ftl.create(1, 1, 1, form), 0)
        assert len(ftl.kv.changes.freed) <= 101


@pytest.mark.parametrize("seed", range(2))
def test_power_cuts_while_garbage_is_erased_lose_nothing_flushed(seed):
    result = bench_crash(300, seed)
    assert (result["lost"], result["wrong"], result["recovered"]) == (0, 0, result["cuts"])
