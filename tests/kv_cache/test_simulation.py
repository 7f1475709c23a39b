"""partner of: kv_cache/simulation.py"""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_cache import HOST, Policy, PolicyError, SchedulerOutput, SchedulerState
from kv_cache.admission import AdmissionConfig
from kv_cache.cost import CostModel, ServingCost
from kv_cache.limits import TierLimits
from kv_cache.metrics import summary
from kv_cache.policies import POLICIES, policy_of
from kv_cache.simulation import engine_for, levels_of, simulate
from kv_cache.trace import Request, Trace, generate
from vcsd_eval.serving.machines import drives

COST = ServingCost(
    name="small",
    compute=CostModel.fitted(layers=6, step_s=0.01, token_s=1e-6, prefill_tokens_per_s=10_000.0),
    fetch_s=0.001,
    fetch_token_s=4e-5,
    room_blocks=60,
    drives=drives(1),
)
TRACE = generate(8, 2.0, (16, 400), (1, 20), cv=1.0, longest=420)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_serves_every_request_with_all_its_tokens(name: str) -> None:
    served = simulate(TRACE, COST, policy_of(name), 0.02)
    assert [sequence.num_output_tokens for sequence in served.sequences] == [
        request.output_tokens for request in TRACE.requests
    ]
    assert served.end_s >= max(request.arrival for request in TRACE.requests)
    busy_s = served.prefill_s + served.decode_s + served.idle_s + served.stalled_s
    assert busy_s == pytest.approx(served.end_s) and not served.rejected


@pytest.mark.parametrize("name", ["reactive", "flexgen", "tutti", "in-two-places"])
def test_block_moving_policies_keep_device_limit(name: str) -> None:
    room = 200 * COST.layers * int(COST.token_bytes)
    engine = engine_for(TRACE, replace(COST, room_blocks=100), policy_of(name), 0.02, tiers=TierLimits(room))
    engine.run()
    assert engine.events is not None and not engine.events.runner.table.entries  # all requests have finished
    assert engine.events.runner.table.peak["device"] <= room


def test_request_of_one_token_leaves_no_blocks() -> None:
    requests = [Request(number=n, arrival=0.0, input_tokens=300, output_tokens=1) for n in range(6)]
    engine = engine_for(Trace(name="one each", requests=requests), COST, policy_of("reactive"), 0.02)
    result = engine.run()
    assert engine.events is not None and not engine.events.runner.table.entries
    assert len(result.sequences) == 6 and result.link_bytes == 0


class Placed(Policy):
    """Each layer in host memory, without a program of its own."""

    def schedule(self, s: SchedulerState) -> SchedulerOutput | None:
        return s.prefill() or s.output(s.sequences, [((HOST,),) * s.cost.layers] * len(s.sequences))


def test_layers_that_are_placed_by_tier_are_fetched() -> None:
    away, here = (simulate(TRACE, COST, policy, 0.02) for policy in (Placed(), policy_of("reactive")))
    assert away.link_bytes > here.link_bytes and away.decode_s > here.decode_s
    strided = Placed()
    strided.strided = True
    with pytest.raises(PolicyError, match="policy Placed: it places layers by tier"):
        simulate(TRACE, COST, strided, 0.02)


def test_device_limit_is_never_exceeded() -> None:
    room, at_once = (
        450 * COST.layers * int(COST.token_bytes),
        [replace(request, arrival=0.0) for request in TRACE.requests],
    )
    trace = replace(TRACE, requests=at_once)
    engine = engine_for(trace, COST, Policy(), 0.02, tiers=TierLimits(room))
    took_s, roomy_s = engine.run().decode_s, simulate(trace, COST, Policy(), 0.02, tiers=TierLimits()).decode_s
    assert engine.events is not None and engine.events.runner.table.peak["device"] <= room and took_s > roomy_s


def test_full_host_memory_is_an_error() -> None:
    with pytest.raises(PolicyError, match="policy DeepSpeed: host memory is full"):
        simulate(TRACE, COST, policy_of("deepspeed"), 0.02, tiers=TierLimits(None, 1000))


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (lambda s: {99: 1}, "it schedules request 99, which is not admitted"),
        (lambda s: {}, "it schedules no request"),
        (lambda s: {s.filling.number: 0}, "0 tokens for request"),
        (lambda s: {s.filling.number: 10**6}, "1000000 tokens for request"),
        (lambda s: 5, "schedule returned 5"),
    ],
)
def test_decision_without_request_names_policy(tokens, reason) -> None:  # type: ignore[no-untyped-def]
    class Odd(Policy):
        def schedule(self, s: SchedulerState) -> SchedulerOutput | None:
            numbers = tokens(s)
            return SchedulerOutput(num_scheduled_tokens=numbers) if isinstance(numbers, dict) else numbers

    with pytest.raises(PolicyError, match=f"policy Odd: {reason}"):
        simulate(TRACE, COST, Odd(), 0.02)


def test_policy_may_wait_for_all_arrivals() -> None:
    class Patient(Policy):
        def schedule(self, s: SchedulerState) -> SchedulerOutput | None:
            return None if s.coming else s.run_all()

    for unit, arrivals in (("s", 0.5), ("steps", 30)):
        requests = [Request(number=n, arrival=n * arrivals, input_tokens=30, output_tokens=4) for n in range(3)]
        served = simulate(Trace(name="few", requests=requests, unit=unit), COST, Patient(), 0.02)
        assert all(sequence.finished for sequence in served.sequences)


def test_a_request_beyond_a_tier_is_refused_or_rejected() -> None:
    tiers = TierLimits(100 * COST.layers * int(COST.token_bytes))
    with pytest.raises(ValueError, match=r"request \d+: .* give it more"):
        simulate(TRACE, COST, policy_of("lru"), 0.02, tiers=tiers)
    served = simulate(TRACE, COST, policy_of("lru"), 0.02, AdmissionConfig(reject=True), tiers=tiers)
    assert 0 < len(served.rejected) < len(TRACE.requests)
    assert len(served.rejected) + len(served.sequences) == len(TRACE.requests)


@pytest.mark.parametrize("name", ["deepspeed", "flexgen-half", "orbitflow", "ours"])
def test_event_timer_charges_changed_placement(name: str) -> None:
    cost = replace(COST, room_blocks=40)
    chain, events = (
        engine_for(TRACE, cost, policy_of(name), 0.02, events=by_events).run() for by_events in (False, True)
    )
    assert set(chain.timed_by) == {"jump", "chain"} and set(events.timed_by) == {"events"}
    assert chain.decode_s * (1 - 1e-6) <= events.decode_s < 1.25 * chain.decode_s


def test_rejected_request_does_not_set_longest_length() -> None:
    long = Request(number=99, arrival=0.0, input_tokens=10**6, output_tokens=1)
    trace = replace(TRACE, requests=[long, *TRACE.requests])
    engine = engine_for(trace, COST, policy_of("dual-blade"), 0.02, AdmissionConfig(reject=True))
    assert engine.events is not None
    assert engine.events.runner.final_tokens == max(request.tokens for request in TRACE.requests)


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
