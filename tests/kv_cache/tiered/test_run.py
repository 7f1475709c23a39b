"""Traces under policies: no tier is over its limit, bytes are conserved, every request ends, and again the same."""

from dataclasses import replace

import pytest

from kv_cache.tiered.machine import Tier
from kv_cache.tiered.policies import POLICIES
from kv_cache.tiered.run import serve
from tests.kv_cache.tiered.small import drawn, machine, trace

ROTATING = ("lru", "lfu", "static", "tierkv")


def watched(policy, seen):
    """A policy whose server is checked in every iteration."""

    def ahead(server):
        policy.ahead(server)
        store, kvs = server.store, [*server.queue, *server.active]
        for tier, room in zip(Tier, store.machine.rooms(), strict=True):
            inside = sum(store.size(kv, tier) for kv in kvs if kv.tier is tier)
            coming = sum(store.size(move.kv, tier) for move in store.running if move.to is tier)
            assert 0 <= store.free[tier] == room - inside - coming
            assert store.room(tier) >= 0
        assert all(kv.is_here for kv in server.active)
        seen.append(server)

    return replace(policy, ahead=ahead)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(25))
def test_rooms_hold_and_all_requests_end(name, seed):
    at, requests, slice_tokens = drawn(seed)
    seen = []
    served = serve(requests, at, watched(POLICIES[name], seen), slice_tokens)
    server = seen[-1]
    assert not server.queue
    assert not server.active
    assert server.store.free == at.rooms()
    assert served.tokens == sum(each.output_tokens for each in requests.requests)
    assert served.seconds >= requests.requests[-1].arrival
    assert served == serve(requests, at, POLICIES[name], slice_tokens)


@pytest.mark.parametrize("seed", range(25))
def test_the_oracle_is_the_fastest_that_rotates(seed):
    at, requests, slice_tokens = drawn(seed)
    seconds = {name: serve(requests, at, POLICIES[name], slice_tokens).seconds for name in (*ROTATING, "oracle")}
    assert min(seconds.values()) > 0.999 * seconds["oracle"]


@pytest.mark.parametrize("seed", range(25))
def test_mended_is_about_as_fast_as_the_best_on_any_machine(seed):
    at, requests, slice_tokens = drawn(seed)
    rates = {name: serve(requests, at, POLICIES[name], slice_tokens).tokens_per_s for name in (*ROTATING, "mended")}
    assert rates.pop("mended") > 0.9 * max(rates.values())


def test_what_fits_is_never_moved():
    requests = trace([(20, 10)] * 3)
    for policy in POLICIES.values():
        served = serve(requests, machine(), policy, 2)
        assert (served.host_bytes, served.flash_bytes, served.hit_share in (None, 1.0)) == (0, 0, True)


def test_a_request_alone_takes_its_prefill_and_its_steps():
    served = serve(trace([(20, 3)]), machine(), POLICIES["tierkv"], 5)
    tokens = 20 + 21 + 22
    assert served.seconds == pytest.approx(20 / 1e4 + 3 * 0.01 + tokens * 1000 / 1e9)


def test_rounds_of_more_than_fits_move_and_two_tiers_compute_again():
    requests = trace([(20, 30)] * 6)
    at = machine(host_bytes=60_000)
    by_name = {name: serve(requests, at, policy, 5) for name, policy in POLICIES.items()}
    assert by_name["static"].flash_bytes > 0 == by_name["lru"].flash_bytes
    assert by_name["lru"].recomputed_tokens > 0 == by_name["static"].recomputed_tokens
    assert by_name["mended"].stalled_share < 0.01 < by_name["static"].stalled_share
    assert by_name["mended"].flash_bytes < by_name["static"].flash_bytes
    assert by_name["mended"].stay_tokens >= by_name["static"].stay_tokens
    assert by_name["mended"].tokens_per_s > max(by_name[name].tokens_per_s for name in ROTATING)


def test_without_rotation_policies_are_equal():
    requests = trace([(20, 10)] * 8)
    seconds = {name: serve(requests, machine(), POLICIES[name], 100).seconds for name in ("lru", "mended", "oracle")}
    assert len(set(seconds.values())) == 1


def test_a_request_that_a_tier_cannot_hold_is_one_line():
    with pytest.raises(ValueError, match=r"request 1: 0\.\d\d MB of K and V, and the tier host has 0\.\d\d MB"):
        serve(trace([(5, 5), (30, 30)]), machine(host_bytes=50_000), POLICIES["static"], 5)


def test_late_requests_are_waited_for():
    served = serve(trace([(20, 3), (20, 3)], gap_s=10), machine(), POLICIES["mended"], 5)
    assert served.seconds == pytest.approx(10.03, abs=0.01)
