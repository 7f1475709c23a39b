"""Drive DRAM as a cache of pages that are read often."""

from dataclasses import replace

import numpy as np

from csd_spec import LAYOUTS
from ftl import Ftl
from ftl.flash.cache import FlashPageCache


def touch(cache, *ppns):
    return cache.touch(np.array(ppns, np.uint32)).tolist()


def test_frequent_pages_replace_rare_ones():
    cache = FlashPageCache(2, 100)
    assert touch(cache, 5, 6, 5) == [True, True, False]
    assert touch(cache, 7, 7) == [True, True]  # once is not enough for 5's place, twice is for 6's
    assert touch(cache, 7, 5, 6) == [False, False, True]


def test_cyclic_reads_of_large_set_still_hit():
    cache = FlashPageCache(10, 100)
    rounds = [cache.touch(np.arange(30, dtype=np.uint32)).sum() for _ in range(200)]
    assert np.mean(rounds[1:]) < 22  # of 30; 20 is the best


def test_formerly_hot_pages_are_evicted():
    cache = FlashPageCache(10, 100)
    for _ in range(100):
        cache.touch(np.arange(10, dtype=np.uint32))
    for _ in range(200):
        missed = cache.touch(np.arange(50, 60, dtype=np.uint32))
    assert not missed.any()


def test_cache_never_exceeds_its_capacity():
    cache, generator = FlashPageCache(10, 1000), np.random.default_rng(0)
    for _ in range(200):
        cache.touch(generator.integers(0, 40, 8).astype(np.uint32))
        cache.forget(generator.integers(0, 40, 1).astype(np.uint32))
        resident = np.flatnonzero(cache._state & 0x80)
        assert resident.size <= 10
        assert np.isin(resident, cache._ring).all()


def test_cache_of_zero_pages_misses_always():
    assert touch(FlashPageCache(0, 100), 5, 5) == [True, True]


def test_hot_embedding_pages_read_once_until_erase(small_drive):
    page = small_drive.geometry.page_bytes
    ftl = Ftl(replace(small_drive, cache_bytes=64 * page))
    layout = LAYOUTS["fp16"].paged(page, 8, 4)
    channels = np.array([[0, 1], [0, 1]], np.int32)
    rows = np.random.default_rng(0).standard_normal((200, 2, 8)).astype(np.float16)

    def pages_read():
        (handle,) = ftl.create(1, 1, 2, layout)
        ftl.append([handle], 0, np.array([200]), rows, rows, 0)
        view = ftl.view([handle], 0)
        plans = [ftl.embedding_pages(view, channels) for _ in range(2)]
        ftl.free([handle], 0)
        ftl.flush(0)
        return [(plan.ppns.size, plan.ends.tolist()) for plan in plans]

    assert ftl.buffers.capacity == small_drive.dram_bytes // page - 64
    groups = 200 // layout.T
    for _ in range(30):  # the same blocks, again and again
        assert pages_read() == [(2 * groups, [groups, 2 * groups]), (0, [0, 0])]
