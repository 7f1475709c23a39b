"""partner of: kv_cache/simulation.py"""

from __future__ import annotations

from dataclasses import replace

import pytest

from eval.serving.machines import drives
from kv_cache.admission import AdmissionConfig
from kv_cache.cost import CostModel, ServingCost
from kv_cache.limits import TierLimits
from kv_cache.metrics import summary
from kv_cache.policies import POLICIES, policy_of
from kv_cache.simulation import engine_for, levels_of, simulate
from kv_cache.trace import Trace, generate

COST = ServingCost(
    name="small",
    compute=CostModel.fitted(layers=6, step_s=0.01, token_s=1e-6, prefill_tokens_per_s=10_000.0),
    fetch_s=0.001,
    fetch_token_s=4e-5,
    room_blocks=60,
    drives=drives(1),
)
TRACE = generate(8, 2.0, (16, 400), (2, 20), cv=1.0, longest=420)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_serves_every_request_with_all_its_tokens(name: str) -> None:
    served = simulate(TRACE, COST, policy_of(name), 0.02)
    assert [each.num_output_tokens for each in served.sequences] == [each.output_tokens for each in TRACE.requests]
    assert served.end_s >= max(each.arrival for each in TRACE.requests)
    busy_s = served.prefill_s + served.decode_s + served.idle_s + served.stalled_s
    assert busy_s <= served.end_s * (1 + 1e-9) and not served.rejected


@pytest.mark.parametrize("name", ["reactive", "flexgen", "tutti", "in-two-places"])
def test_what_moves_blocks_keeps_to_the_device(name: str) -> None:
    room = 200 * COST.layers * int(COST.token_bytes)
    engine = engine_for(TRACE, replace(COST, room_blocks=100), policy_of(name), 0.02, tiers=TierLimits(room))
    engine.run()
    assert engine.events is not None and not engine.events.runner.table.entries  # all have ended
    assert engine.events.runner.table.peak["device"] <= room


def test_a_request_beyond_a_tier_is_refused_or_rejected() -> None:
    tiers = TierLimits(100 * COST.layers * int(COST.token_bytes))
    with pytest.raises(ValueError, match=r"request \d+: .* give it more"):
        simulate(TRACE, COST, policy_of("lru"), 0.02, tiers=tiers)
    served = simulate(TRACE, COST, policy_of("lru"), 0.02, AdmissionConfig(reject=True), tiers=tiers)
    assert 0 < len(served.rejected) < len(TRACE.requests)
    assert len(served.rejected) + len(served.sequences) == len(TRACE.requests)


def test_oracle_is_not_slower_for_copies() -> None:
    tiers = TierLimits(500 * COST.layers * int(COST.token_bytes))
    times = {name: summary(simulate(TRACE, COST, policy_of(name), 0.02, tiers=tiers)) for name in ("oracle", "lru")}
    assert times["oracle"]["makespan_s"] <= times["lru"]["makespan_s"]


def test_levels_take_the_rates_of_the_machine() -> None:
    levels = levels_of(COST, TierLimits(10**9, 10**10), 99)
    assert levels.token_bytes == COST.layers * COST.token_bytes
    assert levels.token_bytes / levels.host_bytes_per_s == pytest.approx(COST.fetch_token_s)
    assert (levels.device_bytes, levels.host_bytes, levels.longest_tokens) == (10**9, 10**10, 100)


def test_an_empty_trace_ends_at_once() -> None:
    assert simulate(Trace(name="none", requests=()), COST, policy_of("flexgen"), 0.02).end_s == 0
