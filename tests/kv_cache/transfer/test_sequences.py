"""Tiers and links: room is never assigned twice, a link carries one copy at a time, and urgent copies go first.

partner of: kv_cache/transfer/sequences.py
"""

import pytest

from kv_cache.transfer.sequences import Level, SequenceStore
from tests.kv_cache.policies.time_slice_setup import machine, stored, trace


def kvs(store, *tokens, level=None):
    """KV caches of requests, in a tier."""
    requests = trace([(token, 5) for token in tokens]).requests
    return [stored(store, request, store.levels.bytes_of(request.tokens + 1), level) for request in requests]


def test_copy_reserves_and_releases_space():
    store = SequenceStore(machine())
    (kv,) = kvs(store, 20, level=Level.DEVICE)
    store.move(kv, Level.HOST, 1)
    assert store.free[:2] == [70_000, 80_000]
    assert store.room(Level.DEVICE) == 100_000
    assert kv.level is Level.DEVICE
    assert not kv.is_here
    store.run_until(0.0019)
    assert kv.move
    store.run_until(0.0021)
    assert (kv.level, kv.move, store.free[:2]) == (Level.HOST, None, [100_000, 80_000])
    assert (store.link_stats[Level.HOST].bytes, store.link_stats[Level.FLASH].bytes) == (20_000, 0)


def test_a_link_carries_one_copy_at_a_time_and_the_urgent_first():
    store = SequenceStore(machine())
    first, late, urgent = kvs(store, 20, 20, 20, level=Level.HOST)
    for kv, urgency in ((first, 5), (late, 5), (urgent, 1)):
        store.move(kv, Level.DEVICE, urgency)
    order = []
    while store.step():
        order += [kv for kv in (first, late, urgent) if kv.is_here and kv not in order]
    assert order == [first, urgent, late]
    assert store.now_s == pytest.approx(0.006)


def test_urgency_of_queued_copy_can_be_raised():
    store = SequenceStore(machine())
    first, second, third = kvs(store, 20, 20, 20, level=Level.HOST)
    for kv in (first, second, third):
        store.move(kv, Level.DEVICE, 5)
    store.raise_priority(third.move, 0)
    store.step()
    store.step()
    assert (third.is_here, second.is_here) == (True, False)


def test_copy_without_space_waits_and_smaller_one_passes():
    store = SequenceStore(machine(device_bytes=40_000))
    here, large, small = *kvs(store, 20, level=Level.DEVICE), *kvs(store, 30, 5, level=Level.HOST)
    store.move(large, Level.DEVICE, 1)
    store.move(small, Level.DEVICE, 2)
    assert store.room(Level.DEVICE) < 0
    while store.step():
        pass
    assert (small.is_here, large.level) == (True, Level.HOST)
    store.drop(here)
    store.drop(small)
    assert store.step()
    assert large.is_here


def test_device_to_flash_occupies_both_links():
    store = SequenceStore(machine())
    (kv,) = kvs(store, 20, level=Level.DEVICE)
    store.move(kv, Level.FLASH, 0)
    assert store.step()
    assert store.now_s == pytest.approx(0.02)
    assert [each.busy_s for each in store.link_stats.values()] == pytest.approx([0.02, 0.02])
    assert store.free == [*store.levels.capacities()[:2], store.levels.flash_bytes - 20_000]


def test_new_request_takes_space_without_copy():
    store = SequenceStore(machine())
    (kv,) = kvs(store, 20)
    store.move(kv, Level.DEVICE, 0)
    assert kv.is_here
    assert not store.step()


def test_sizes_are_rounded_up_to_blocks():
    assert [machine().bytes_of(tokens) for tokens in (0, 1, 10, 11)] == [0, 10_000, 10_000, 20_000]


def test_a_copy_has_a_start_and_a_rate():
    one = machine(host_start_s=0.5, flash_start_s=0.25)
    assert one.copy_s(Level.HOST, 10**7) == pytest.approx(1.5)
    assert one.copy_s(Level.FLASH, 10**6) == pytest.approx(1.25)
    free = one.with_instant_copies()
    assert free.copy_s(Level.HOST, 10**12) < 1e-9
    assert free.capacities() == one.capacities()


def test_invalid_sequence_store_field_is_named():
    with pytest.raises(ValueError, match="host_bytes = 0: must be at least 1"):
        machine(host_bytes=0)
    with pytest.raises(ValueError, match=r"request 1: 0\.06 MB of KV cache, and the tier host has 0\.05 MB"):
        machine(host_bytes=50_000).check(60, 1)
