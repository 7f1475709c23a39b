"""Who makes room for whom."""

from types import SimpleNamespace

import pytest

from kv_cache.tiered.machine import Tier
from kv_cache.tiered.policies import POLICIES
from kv_cache.tiered.server import NOW, ON_FLASH, Counts, Server
from kv_cache.tiered.store import Kv, Store
from tests.kv_cache.tiered.small import machine, trace


def server(name, count, tier, **more):
    """A server with requests of 20 tokens in a tier, all of which wait."""
    at = machine(**more)
    one = Server(at, POLICIES[name], 5, at.device_bytes, Store(at), iteration_s=0.01)
    for request in trace([(15, 5)] * count).requests:
        kv = Kv(request, at.bytes_of(20), 15, absent=False, tier=tier)
        one.store.free[tier] -= one.store.size(kv, tier)
        one.queue.append(kv)
    return one


def test_reactive_displaces_what_was_used_longest_ago():
    one = server("static", 5, Tier.DEVICE)
    for used, kv in enumerate(reversed(one.queue)):
        kv.used = used
    (extra,) = server("static", 1, Tier.HOST).queue
    one.store.free[Tier.HOST] -= 20_000
    one.queue.append(extra)
    assert one.bring(extra, Tier.DEVICE, NOW)
    moving = [kv for kv in one.queue if kv.move and kv is not extra]
    assert [kv.used for kv in moving] == [0]


def test_nothing_is_displaced_that_is_due_sooner():
    one = server("mended", 5, Tier.HOST, prefill_tokens_per_s=1)
    (extra,) = server("mended", 1, Tier.FLASH).queue
    one.queue.append(extra)
    assert not one.bring(extra, Tier.HOST, 1)
    one.queue.insert(0, one.queue.pop())
    assert one.bring(extra, Tier.HOST, 1)
    assert [bool(kv.move) for kv in one.queue] == [True, False, False, False, False, True]


def test_two_tiers_give_up_what_three_keep():
    for name, kept in (("lru", False), ("static", True)):
        one = server(name, 5, Tier.HOST)
        victim = one.queue[0]
        assert one._displace(victim, NOW, one.queue[1])
        assert (bool(victim.move), victim.absent) == (kept, not kept)


def test_a_full_flash_is_one_line():
    one = server("static", 5, Tier.HOST, flash_bytes=10_000)
    with pytest.raises(ValueError, match="flash is full: 0 GB do not hold"):
        one._displace(one.queue[0], NOW, one.queue[1])


def test_no_more_goes_to_flash_than_can_be_read_again():
    one = server("mended", ON_FLASH, Tier.FLASH)
    assert not one.may_fill_flash()
    one.queue.pop()
    assert one.may_fill_flash()


def test_computing_again_costs_all_who_decode():
    one = server("mended", 3, Tier.HOST, prefill_tokens_per_s=2e3, flash_bytes_per_s=1e6)
    assert one.computes_sooner(one.queue[0], Tier.FLASH)
    assert not one.computes_sooner(one.queue[0], Tier.HOST)
    for kv in list(one.queue):
        one.enter(kv)
    assert not one.computes_sooner(one.active[0], Tier.FLASH)


def test_a_stay_is_counted_and_an_iteration_takes_its_time():
    kv = SimpleNamespace(room=7, uses=0, left_s=1.0)
    ran = []
    store = SimpleNamespace(now_s=3.0, run_until=ran.append, carried={})
    one = SimpleNamespace(queue=[kv], active=[], active_bytes=0, counts=Counts(), store=store)
    Server.enter(one, kv)
    assert (one.counts.stays, one.counts.longest_wait_s, one.active, one.queue) == (1, 2.0, [kv], [])
    one.iteration, one.iteration_s, one.busy = 0, 0.5, []
    Server.iterated(one, 0.25)
    assert (one.iteration, ran) == (1, [3.25])
