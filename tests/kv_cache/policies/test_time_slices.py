"""Time slices: preempted requests, and the requests that replace them.

partner of: kv_cache/policies/time_slices.py
"""

from types import SimpleNamespace

import pytest

from kv_cache.policies.time_slices import MAX_ON_FLASH, NOW, SliceCounters, TimeSlices
from kv_cache.scheduler import IterationResult, SchedulerOutput
from kv_cache.transfer.sequences import Level
from tests.kv_cache.policies.time_slice_setup import waiting


def test_reactive_evicts_least_recently_used():
    one = waiting("static", 5, Level.DEVICE)
    for used, kv in enumerate(reversed(one.queue)):
        kv.used = used
    (extra,) = waiting("static", 1, Level.HOST).queue
    one.store.free[Level.HOST] -= 20_000
    one.queue.append(extra)
    assert one.request_copy(extra, Level.DEVICE, NOW)
    moving = [kv for kv in one.queue if kv.move and kv is not extra]
    assert [kv.used for kv in moving] == [0]


def test_requests_due_sooner_are_not_evicted():
    one = waiting("mended", 5, Level.HOST, prefill_tokens_per_s=1)
    (extra,) = waiting("mended", 1, Level.FLASH).queue
    one.queue.append(extra)
    assert not one.request_copy(extra, Level.HOST, 1)
    one.queue.insert(0, one.queue.pop())
    assert one.request_copy(extra, Level.HOST, 1)
    assert [bool(kv.move) for kv in one.queue] == [True, False, False, False, False, True]


def test_two_tiers_drop_kv_that_three_tiers_keep():
    for name, is_kept in (("lru", False), ("static", True)):
        one = waiting(name, 5, Level.HOST)
        victim = one.queue[0]
        assert one._displace(victim, NOW, one.queue[1])
        assert (bool(victim.move), victim.is_absent) == (is_kept, not is_kept)


def test_a_full_flash_is_one_line():
    one = waiting("static", 5, Level.HOST, flash_bytes=10_000)
    with pytest.raises(ValueError, match="flash is full: 0 GB do not hold"):
        one._displace(one.queue[0], NOW, one.queue[1])


def test_number_of_requests_on_flash_is_limited():
    one = waiting("mended", MAX_ON_FLASH, Level.FLASH)
    assert not one.may_fill_flash()
    one.queue.pop()
    assert one.may_fill_flash()


def test_recompute_cost_counts_all_decoding_requests():
    one = waiting("mended", 3, Level.HOST, prefill_tokens_per_s=2e3, flash_bytes_per_s=1e6)
    assert one.recompute_is_faster(one.queue[0], Level.FLASH)
    assert not one.recompute_is_faster(one.queue[0], Level.HOST)
    for kv in list(one.queue):
        one.enter(kv)
    assert not one.recompute_is_faster(one.active[0], Level.FLASH)


def test_stay_is_counted_and_iteration_advances_time():
    kv = SimpleNamespace(room=7, uses=0, left_s=1.0, turn=0)
    store = SimpleNamespace(now_s=3.0, link_stats={})
    one = SimpleNamespace(queue=[kv], active=[], active_bytes=0, counts=SliceCounters(), store=store)
    TimeSlices.enter(one, kv)
    assert (one.counts.stays, one.counts.longest_wait_s, one.active, one.queue) == (1, 2.0, [kv], [])
    one.iteration, one.iteration_s, one._busy = 0, 0.5, []
    TimeSlices.update(one, SchedulerOutput(num_scheduled_tokens={}), IterationResult(0.25, 1, "jump"))
    assert (one.iteration, one.iteration_s, kv.turn, one._busy) == (1, pytest.approx(0.475), 1, [(3.0, {})])
