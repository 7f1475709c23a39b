"""Serving: every request gets all its tokens, policies keep within the device, and SLO attainment of tokens.

partner of: kv_cache/engine.py, kv_cache/transfer/chain.py, kv_cache/cost.py, kv_cache/policies/orbitflow.py,
kv_cache/metrics.py
"""

from collections import deque
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from kv_cache.admission import AdmissionConfig
from kv_cache.cost import CostModel, DriveModel, ServingCost
from kv_cache.metrics import RunResult, attained, deadline_attainment, summary, tbt_slo_attainment
from kv_cache.planner.problem import Offload, spread
from kv_cache.policies import POLICIES, policy_of
from kv_cache.policies.orbitflow import FlexGenHalf, OrbitFlow, PlacementPolicy
from kv_cache.request import SequenceState
from kv_cache.scheduler import Policy, SchedulerOutput, SchedulerState
from kv_cache.simulation import simulate
from kv_cache.trace import Request, Trace

COST = ServingCost(
    name="small",
    compute=CostModel.fitted(layers=8, step_s=0.01, token_s=1e-6, prefill_tokens_per_s=10_000.0),
    fetch_s=0.001,
    fetch_token_s=4e-5,
    room_blocks=40,
)
WITH_DRIVE = replace(COST, drives=DriveModel(bytes_per_s=1e9, token_bytes=1000.0, call_s=1e-5))
ALL = {
    **{name: POLICIES[name] for name in POLICIES if isinstance(policy_of(name), PlacementPolicy)},
    "strict": partial(OrbitFlow, late=0),
    "no pause": partial(OrbitFlow, pauses=False),
    "uniform": partial(OrbitFlow, uniform=True),
    "no deposit": partial(OrbitFlow, deposits=False),
    "any count": partial(OrbitFlow, counts=spread),
    "drives": partial(OrbitFlow, drives=True),
}


def trace(unit="s", count=14, seed=0):
    generator = np.random.default_rng(seed)
    arrivals = np.cumsum(generator.exponential(0.4 if unit == "s" else 30, count))
    requests = [
        Request(
            number=number,
            arrival=float(at) if unit == "s" else int(at),
            input_tokens=int(generator.integers(16, 400)),
            output_tokens=1 if number % 5 == 2 else int(generator.integers(2, 120)),
        )
        for number, at in enumerate(arrivals)
    ]
    return Trace(name="random", requests=requests, unit=unit)


@pytest.mark.parametrize("unit", ["s", "steps"])
@pytest.mark.parametrize("name", ALL)
def test_every_request_gets_its_tokens_in_order(name, unit):
    cost = WITH_DRIVE if name in ("drives", "ours") else COST
    served = simulate(trace(unit), cost, Policy.of(ALL[name]), 0.02)
    assert sorted(sequence.request.number for sequence in served.sequences) == list(range(14))
    for live in served.sequences:
        assert live.num_output_tokens == live.request.output_tokens == live.token_times_s.size == live.step_s.size
        assert (np.diff(live.token_times_s) > 0).all() and live.token_times_s[0] > live.arrived_s
    assert served.end_s == max(sequence.token_times_s[-1] for sequence in served.sequences)
    assert served.end_s == pytest.approx(served.prefill_s + served.decode_s + served.idle_s)
    again = simulate(trace(unit), cost, Policy.of(ALL[name]), 0.02)
    assert summary(again) == summary(served)


@pytest.mark.parametrize("name", ["heuristic", "flexgen-half", "orbitflow"])
def test_loop_steps_equal_single_steps(name):
    class OneByOne(PlacementPolicy):
        policy = Policy.of(ALL[name])

        def place(self, s: SchedulerState) -> SchedulerOutput:
            return replace(self.policy.place(s), num_steps=1)

    fast, slow = (simulate(trace(), COST, policy, 0.02) for policy in (Policy.of(ALL[name]), OneByOne()))
    assert fast.steps == slow.steps and fast.decided < slow.decided
    for a, b in zip(fast.sequences, slow.sequences, strict=True):
        np.testing.assert_allclose(a.token_times_s, b.token_times_s, rtol=1e-12)


def test_copies_of_a_policy_take_their_time():
    moved = simulate(trace(), COST, policy_of("flexgen"), 0.02)
    stays = simulate(trace(), replace(COST, room_blocks=1 << 20), policy_of("reactive"), 0.02)
    assert set(moved.timed_by) == set(stays.timed_by) == {"events"}
    assert moved.decode_s > 1.01 * stays.decode_s and moved.link_bytes > stays.link_bytes == 0
    plain = simulate(trace(), replace(COST, room_blocks=1 << 20), policy_of("orbitflow"), 0.02)
    assert stays.end_s == pytest.approx(plain.end_s, rel=1e-6)


def test_admission_respects_slots_and_order():
    served = simulate(trace(), COST, FlexGenHalf(), 0.02, AdmissionConfig(max_batch_size=2))
    firsts = [sequence.token_times_s[0] for sequence in served.sequences]
    assert firsts == sorted(firsts)  # requests are admitted in order of arrival
    busy = [(sequence.token_times_s[0], sequence.token_times_s[-1]) for sequence in served.sequences]
    for begin, _ in busy:
        assert sum(a <= begin < b for a, b in busy) <= 2


def test_drives_shorten_steps_that_do_not_fit():
    plain = simulate(trace(), COST, OrbitFlow(pauses=False), 0.02)
    helped = simulate(trace(), WITH_DRIVE, OrbitFlow(pauses=False, drives=True), 0.02)
    assert plain.attended_layers == 0 < helped.attended_layers
    assert helped.decode_s < plain.decode_s


def test_a_request_longer_than_the_device_is_refused():
    long = Trace(name="long", requests=[Request(number=3, arrival=0, input_tokens=5000, output_tokens=2)])
    with pytest.raises(ValueError, match="request 3: 5,001 tokens, small has room for 1,024"):
        simulate(long, COST, FlexGenHalf(), 0.02)


def test_policy_without_runner_or_too_large_detected():
    class Idle(PlacementPolicy):
        def place(self, s: SchedulerState) -> SchedulerOutput:
            return None

    class Greedy(PlacementPolicy):
        def place(self, s: SchedulerState) -> SchedulerOutput:
            return s.output(s.sequences, [Offload(0)] * len(s.sequences))

    with pytest.raises(RuntimeError, match="schedules no request"):
        simulate(trace(), COST, Idle(), 0.02)
    with pytest.raises(RuntimeError, match="does not fit"):
        simulate(trace(), replace(COST, room_blocks=25), Greedy(), 0.02)


def live(made, steps):
    request = Request(number=0, arrival=0, input_tokens=1, output_tokens=len(made))
    return SequenceState(request, 0.0, [(np.array(made), np.array(steps))], len(made))


def test_slo_attainment_by_three_definitions():
    # due 1, 2, 3, 4, 5 s after the first token; paused for 3 s before the fourth
    one = live([0, 0.5, 1.0, 4.0, 4.5, 5.0], [9, 0.5, 0.5, 0.5, 0.5, 0.5])
    served = RunResult(slo_s=1.0, sequences=[one], end_s=5.0)
    assert attained(served) == 1.0  # steps were short: a pause is in none of them
    assert tbt_slo_attainment(served) == 4 / 5
    assert deadline_attainment(served) == 3 / 5  # the third and the fourth came at 4 and 4.5
    slow = RunResult(slo_s=1.0, sequences=[live([0, 0.2, 0.4, 2.0, 3.8, 4.0], [9, 0.2, 0.2, 1.6, 1.8, 0.2])], end_s=4.0)
    assert attained(slow) == 3 / 5 and attained(slow, deposit=True) == 1.0  # early tokens mask it


def test_a_deposit_gives_a_token_an_interval():
    one = live([0, 0.1, 0.2, 0.3], [0.1] * 4)
    one.deposit = deque(one.token_times_s.tolist())
    now = SchedulerState(cost=COST, sequences=[one], slo_s=1.0, now_s=0.0, step=0, changed=False)
    assert now.deposited(one) == 3  # the first has left at once
    now.now_s = 1.0
    assert now.deposited(one) == 2
    now.now_s = 9.0
    assert now.deposited(one) == 0


def test_planner_pauses_longest_request_if_late():
    requests = [
        Request(number=n, arrival=0, input_tokens=prompt, output_tokens=50) for n, prompt in enumerate((300, 30))
    ]
    seen = []

    class Watched(PlacementPolicy):
        def place(self, s: SchedulerState) -> SchedulerOutput:
            output = OrbitFlow(late=0).place(s)
            seen.append(list(output.num_scheduled_tokens))
            return output

    served = simulate(Trace(name="two", requests=requests), replace(COST, room_blocks=18), Watched(), 0.0101)
    assert [1] in seen and all(sequence.num_output_tokens == 50 for sequence in served.sequences)
