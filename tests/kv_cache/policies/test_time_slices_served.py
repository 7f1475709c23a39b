"""Traces under policies: no tier exceeds its limit, bytes are conserved, every request finishes, results are
reproducible.
"""

import pytest

from kv_cache.policies import POLICIES, policy_of
from kv_cache.policies.time_slices import TimeSlices
from kv_cache.transfer.sequences import Level
from tests.kv_cache.policies.time_slice_setup import drawn, machine, served, trace

NAMES = [name for name in POLICIES if isinstance(policy_of(name), TimeSlices)]
ROTATING = ("lru", "lfu", "static", "tierkv")


def watched(name, seen):
    """A policy that is checked in every iteration."""
    policy = policy_of(name)
    ahead = policy.copy_ahead

    def copy_ahead():
        ahead()
        store, kvs = policy.store, [*policy.queue, *policy.active]
        for level, room in zip(Level, store.levels.capacities(), strict=True):
            inside = sum(store.size(kv, level) for kv in kvs if kv.level is level)
            coming = sum(store.size(move.kv, level) for move in store.running if move.to is level)
            assert 0 <= store.free[level] == room - inside - coming
            assert store.room(level) >= 0
        assert all(kv.is_here for kv in policy.active)
        seen.append(policy)

    policy.copy_ahead = copy_ahead
    return policy


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(25))
def test_tiers_keep_limits_and_all_requests_end(name, seed):
    at, requests, slice_tokens, per_s = drawn(seed)
    seen = []
    policy, done = served(requests, at, name, slice_tokens, watched(name, seen), prefill_tokens_per_s=per_s)
    assert seen and not policy.queue and not policy.active
    assert policy.store.free == at.capacities()
    assert all(sequence.finished for sequence in done.sequences) and len(done.sequences) == len(requests.requests)
    assert done.end_s >= requests.requests[-1].arrival
    again, same = served(requests, at, name, slice_tokens, prefill_tokens_per_s=per_s)
    assert (same.end_s, again.counts) == (done.end_s, policy.counts)


def seconds(names, requests, at, slice_tokens, **more):
    """Seconds of a trace under policies."""
    return {name: served(requests, at, name, slice_tokens, **more)[1].end_s for name in names}


@pytest.mark.parametrize("seed", range(25))
def test_oracle_is_fastest_rotating_policy(seed):
    at, requests, slice_tokens, per_s = drawn(seed)
    took = seconds((*ROTATING, "oracle"), requests, at, slice_tokens, prefill_tokens_per_s=per_s)
    assert min(took.values()) > 0.999 * took["oracle"]


@pytest.mark.parametrize("seed", range(25))
def test_mended_is_close_to_best_on_random_machines(seed):
    at, requests, slice_tokens, per_s = drawn(seed)
    took = seconds((*ROTATING, "mended"), requests, at, slice_tokens, prefill_tokens_per_s=per_s)
    assert took.pop("mended") < min(took.values()) / 0.9


def test_requests_that_fit_are_never_moved():
    requests = trace([(20, 10)] * 3)
    for name in NAMES:
        policy, _ = served(requests, machine(), name, 2)
        assert all(stats.bytes == 0 for stats in policy.store.link_stats.values())
        assert policy.counts.hits == policy.counts.entries


def test_single_request_takes_prefill_and_steps():
    _, done = served(trace([(20, 3)]), machine(), "tierkv", 5)
    assert done.end_s == pytest.approx(20 / 1e4 + 3 * 0.01 + (20 + 21 + 22) * 1000 / 1e9)


def test_oversized_rounds_move_two_tiers_recompute():
    requests, at = trace([(20, 30)] * 6), machine(host_bytes=60_000)
    results = {name: served(requests, at, name, 5) for name in NAMES}
    counts = {name: policy.counts for name, (policy, _) in results.items()}
    flash = {name: policy.store.link_stats[Level.FLASH].bytes for name, (policy, _) in results.items()}
    assert flash["static"] > 0 == flash["lru"]
    assert counts["lru"].recomputed_tokens > 0 == counts["static"].recomputed_tokens
    stalled = {name: (counts[name].stalled_s + done.stalled_s) / done.end_s for name, (_, done) in results.items()}
    assert stalled["mended"] < 0.01 < stalled["static"]
    assert flash["mended"] < flash["static"]
    assert counts["mended"].stays <= counts["static"].stays
    assert results["mended"][1].end_s < min(results[name][1].end_s for name in ROTATING)


def test_without_rotation_policies_are_equal():
    took = seconds(("lru", "mended", "oracle"), trace([(20, 10)] * 8), machine(), 100)
    assert len(set(took.values())) == 1


def test_idle_engine_waits_for_late_requests():
    _, done = served(trace([(20, 3), (20, 3)], gap_s=10), machine(), "mended", 5)
    assert done.end_s == pytest.approx(10.03, abs=0.01) and done.idle_s > 9.9
