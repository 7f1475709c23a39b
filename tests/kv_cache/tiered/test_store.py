"""Tiers and links: room is never given twice, a link carries one copy at a time, and the urgent go first."""

import pytest

from kv_cache.tiered.machine import Tier
from kv_cache.tiered.store import Kv, Store
from tests.kv_cache.tiered.small import machine, trace


def kvs(store, *tokens, tier=None):
    """K and V of requests, in a tier."""
    made = []
    for request in trace([(each, 5) for each in tokens]).requests:
        kv = Kv(request, store.machine.bytes_of(request.tokens + 1), request.input_tokens)
        if tier is not None:
            store.free[tier] -= store.size(kv, tier)
            kv.tier, kv.absent = tier, False
        made.append(kv)
    return made


def test_a_copy_takes_room_when_it_begins_and_gives_it_up_when_it_ends():
    store = Store(machine())
    (kv,) = kvs(store, 20, tier=Tier.DEVICE)
    store.move(kv, Tier.HOST, 1)
    assert store.free[:2] == [70_000, 80_000]
    assert store.room(Tier.DEVICE) == 100_000
    assert kv.tier is Tier.DEVICE
    assert not kv.is_here
    store.run_until(0.0019)
    assert kv.move
    store.run_until(0.0021)
    assert (kv.tier, kv.move, store.free[:2]) == (Tier.HOST, None, [100_000, 80_000])
    assert (store.carried[Tier.HOST].bytes, store.carried[Tier.FLASH].bytes) == (20_000, 0)


def test_a_link_carries_one_copy_at_a_time_and_the_urgent_first():
    store = Store(machine())
    first, late, urgent = kvs(store, 20, 20, 20, tier=Tier.HOST)
    for kv, urgency in ((first, 5), (late, 5), (urgent, 1)):
        store.move(kv, Tier.DEVICE, urgency)
    order = []
    while store.step():
        order += [kv for kv in (first, late, urgent) if kv.is_here and kv not in order]
    assert order == [first, urgent, late]
    assert store.now_s == pytest.approx(0.006)


def test_a_copy_may_be_hurried():
    store = Store(machine())
    first, second, third = kvs(store, 20, 20, 20, tier=Tier.HOST)
    for kv in (first, second, third):
        store.move(kv, Tier.DEVICE, 5)
    store.hurry(third.move, 0)
    store.step()
    store.step()
    assert (third.is_here, second.is_here) == (True, False)


def test_who_finds_no_room_waits_and_lets_others_pass():
    store = Store(machine(device_bytes=40_000))
    here, large, small = *kvs(store, 20, tier=Tier.DEVICE), *kvs(store, 30, 5, tier=Tier.HOST)
    store.move(large, Tier.DEVICE, 1)
    store.move(small, Tier.DEVICE, 2)
    assert store.room(Tier.DEVICE) < 0
    while store.step():
        pass
    assert (small.is_here, large.tier) == (True, Tier.HOST)
    store.drop(here)
    store.drop(small)
    assert store.step()
    assert large.is_here


def test_device_to_flash_occupies_both_links_as_long_as_the_slower_needs():
    store = Store(machine())
    (kv,) = kvs(store, 20, tier=Tier.DEVICE)
    store.move(kv, Tier.FLASH, 0)
    assert store.step()
    assert store.now_s == pytest.approx(0.02)
    assert [each.busy_s for each in store.carried.values()] == pytest.approx([0.02, 0.02])
    assert store.free == [*store.machine.rooms()[:2], store.machine.flash_bytes - 20_000]


def test_new_requests_need_room_and_no_copy():
    store = Store(machine())
    (kv,) = kvs(store, 20)
    store.move(kv, Tier.DEVICE, 0)
    assert kv.is_here
    assert not store.step()
