"""Tier limits that change while requests are served: the step time soon equals that of a run with these limits.

partner of: kv_cache/engine.py, kv_cache/iteration.py, kv_cache/placement_runner.py, kv_cache/policies/split.py,
kv_cache/policies/auto.py, kv_cache/policies/time_slices.py
"""

from __future__ import annotations

from functools import cache

import pytest

from kv_cache import DEVICE, HOST, PAGE_CACHE, POLICIES, Engine, IterationRunner
from kv_cache.admission import AdmissionConfig
from kv_cache.cost import CostModel, ServingCost
from kv_cache.limits import TierLimits
from kv_cache.policies import policy_of
from kv_cache.policies.split import Split
from kv_cache.policies.time_slices import TimeSlices
from kv_cache.simulation import engine_for
from kv_cache.trace import Request, Trace
from kv_cache.transfer.simulated import LayerTime, SimulatedTransfers
from vcsd_eval.serving.machines import drives

LAYERS, ROWS, PROMPT, OUTPUT = 16, 3, 1024, 160
COST = ServingCost(
    name="small",
    compute=CostModel.fitted(layers=LAYERS, step_s=2e-3, token_s=1e-6, prefill_tokens_per_s=2e5),
    fetch_s=1e-4,
    fetch_token_s=LAYERS * 4096 / 25e9,
    room_blocks=1,
    drives=drives(1),
)
KV_BYTES = int(ROWS * (PROMPT + OUTPUT) * LAYERS * COST.token_bytes)
TRACE = Trace(
    name="together",
    requests=[Request(number=n, arrival=0.0, input_tokens=PROMPT, output_tokens=OUTPUT) for n in range(ROWS)],
)
SHARES = {DEVICE: 0.4, HOST: 2.0, PAGE_CACHE: 2.0}  # of KV_BYTES, of tiers whose limits do not change
FIRST, SECOND, SETTLING, MEASURED = 36, 90, 24, 30  # tokens of all requests: when limits change, until when, how long
MOST = 1.1  # times the step of a run that had the limit from the beginning
CASES = {  # tiers, and their larger and smaller share
    "device": ((DEVICE,), 0.75, 0.375),
    "memory": ((HOST, PAGE_CACHE), 0.75, 0.375),
    "much memory": ((HOST, PAGE_CACHE), 1.3, 0.65),
}
PLANS_ONCE = pytest.mark.xfail(strict=True, reason="Dual-Blade plans at initialization: arXiv 2604.26557, IV-A")
SPLITS_ONCE = pytest.mark.xfail(strict=True, reason="the blocks of a request are those of its prefill")


def limits(case: str, share: float) -> dict[str, int]:
    """Bytes by tier."""
    return {
        tier: int(fraction * KV_BYTES) for tier, fraction in (SHARES | dict.fromkeys(CASES[case][0], share)).items()
    }


def engine(name: str, given: dict[str, int]) -> Engine:
    policy = policy_of(name)
    if isinstance(policy, TimeSlices):
        policy.slice_tokens = 4
    cost, tiers = COST.with_room(given[DEVICE]), TierLimits(given[DEVICE], given[HOST], given[PAGE_CACHE])
    return engine_for(TRACE, cost, policy, 1.0, AdmissionConfig(max_batch_size=ROWS), tiers, events=policy.strided)


def made(one: Engine) -> int:
    return sum(sequence.num_output_tokens for sequence in one.done.sequences)


def run_until(one: Engine, tokens: int) -> None:
    while made(one) < tokens:
        assert one.step()


def token_s(one: Engine, changed: int) -> float:
    """Seconds per token, after a change at `changed` tokens has settled."""
    run_until(one, changed + SETTLING)
    began_s, before = one.now_s, made(one)
    run_until(one, changed + SETTLING + MEASURED)
    return (one.now_s - began_s) / (made(one) - before)


@cache
def fresh_s(name: str, case: str, share: float, changed: int) -> float:
    """The same of a run that had the limits from the beginning."""
    return token_s(engine(name, limits(case, share)), changed)


def holds_limits(one: Engine, given: dict[str, int]) -> bool:
    """Whether no tier in memory holds more than its limit."""
    if one.store is not None:
        return min(one.store.free) >= 0
    return one.events is None or all(one.events.runner.table.used[tier] <= given[tier] for tier in (DEVICE, HOST))


def cases(more: dict[tuple[str, str], list[object]]) -> list[object]:
    """Every policy with every case. more: marks of some."""
    names = [(name, case) for name in POLICIES for case in CASES]
    marks = {("dual-blade", case): [PLANS_ONCE] for case in ("memory", "much memory")} | more
    return [pytest.param(*name, marks=marks.get(name, [])) for name in names]


@pytest.mark.parametrize(("name", "case"), cases({}))
def test_lowered_limit_gives_step_of_fresh_run(name: str, case: str) -> None:
    """And when the limit rises again."""
    _, high, low = CASES[case]
    one = engine(name, limits(case, high))
    for changed, share in ((FIRST, low), (SECOND, high)):
        run_until(one, changed)
        one.set_limits(limits(case, share))
        assert token_s(one, changed) < MOST * fresh_s(name, case, share, changed)
        assert holds_limits(one, limits(case, share))


@pytest.mark.parametrize(("name", "case"), cases({("in-two-places", "device"): [SPLITS_ONCE]}))
def test_raised_limit_gives_step_of_fresh_run(name: str, case: str) -> None:
    _, high, low = CASES[case]
    one = engine(name, limits(case, low))
    run_until(one, FIRST)
    one.set_limits(limits(case, high))
    assert token_s(one, FIRST) < MOST * fresh_s(name, case, high, FIRST)


def split_steps(at: dict[int, float], told: bool, steps: int = 200) -> list[float]:
    """Seconds of each decode step of `split` with feedback; keys and values are separate blocks.

    Args:
        at: Fraction of the KV data that the page cache keeps, by the first step with that limit.
        told: Whether the policy is informed.
        steps: Decode steps.
    """
    kv_bytes = 2 * LAYERS * (PROMPT + steps) * 2048
    machine = TierLimits(kv_bytes).machine(int(at[0] * kv_bytes))
    transfers = SimulatedTransfers(machine, lambda attention: LayerTime(10_000))
    program = Split(feedback=True).layers
    run = IterationRunner(machine, range(LAYERS), program, transfers, final_tokens=PROMPT + steps)
    run.run({"r": PROMPT}, {"r": 2048})
    transfers.settle()
    for step in range(steps):
        if step in at:
            if told:
                run.set_limits({PAGE_CACHE: int(at[step] * kv_bytes)})
            else:
                transfers.caches[PAGE_CACHE].set_limit(int(at[step] * kv_bytes))
        run.run({"r": 1}, {"r": 2048})
    return [iteration_ns / 1e9 for iteration_ns in transfers.iterations_ns[1:]]


@pytest.mark.parametrize(("told", "fall", "rise"), [(True, 2, 2), (False, 20, 48)])
def test_split_with_feedback_follows_changed_limit(told: bool, fall: int, rise: int) -> None:
    """If it is not informed of the limit, it learns it from page-cache hits, later."""
    steps = split_steps({0: 0.5, 20: 0.25, 100: 0.5}, told)
    low, high = split_steps({0: 0.25}, told), split_steps({0: 0.5}, told)
    assert max(low[20:]) > 1.1 * max(high[20:])
    for first, end, same in ((20 + fall, 100, low), (100 + rise, 200, high)):
        assert sum(steps[first:end]) < MOST * sum(same[first:end])
