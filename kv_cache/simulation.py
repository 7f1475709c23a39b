"""Simulation: serve a trace in simulated time with any policy, and the tiers and links that it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kv_cache.admission import AdmissionConfig
from kv_cache.cost import ServingCost
from kv_cache.engine import Engine
from kv_cache.event_timer import EventTimer, machine_of
from kv_cache.limits import TierLimits
from kv_cache.metrics import RunResult
from kv_cache.planner.problem import BLOCK_TOKENS
from kv_cache.policies.time_slices import TimeSlices
from kv_cache.scheduler import Policy
from kv_cache.trace import Trace
from kv_cache.transfer.sequences import Levels, SequenceStore

UNLIMITED = 1 << 40  # bytes, for a tier without a limit
FLASH_SHARE = 0.25  # speed of flash as a fraction of the link to host memory


def simulate(
    trace: Trace,
    cost: ServingCost,
    policy: Policy,
    slo_s: float,
    admission: AdmissionConfig = AdmissionConfig(),
    tick: Callable[[int], object] = lambda done: None,
    tiers: TierLimits | None = None,
) -> RunResult:
    """Serve a trace in simulated time.

    Arrivals in engine steps are counted in decode steps, so a slow engine gets fewer requests in the same time.

    Args:
        trace: Requests.
        cost: Cost model of the machine.
        policy: The policy.
        slo_s: Objective, seconds between tokens.
        admission: Admission control.
        tick: Called after each step with the number of finished requests.
        tiers: Limits of tiers; None: the device's limit follows from the cost model, other tiers are unlimited.

    Raises:
        ValueError: A request can never fit on the device, and `admission` does not reject such requests.
        PolicyError: The policy requested something forbidden.
    """
    return engine_for(trace, cost, policy, slo_s, admission, tiers).run(tick)


def engine_for(
    trace: Trace,
    cost: ServingCost,
    policy: Policy,
    slo_s: float,
    admission: AdmissionConfig = AdmissionConfig(),
    tiers: TierLimits | None = None,
    events: bool = False,
) -> Engine:
    """Create the engine of `simulate`; `events` times every policy by events that supports it."""
    if tiers is None:
        tiers = TierLimits(min(UNLIMITED, int(cost.room_blocks * BLOCK_TOKENS * cost.layers * cost.token_bytes)))
    if isinstance(policy, TimeSlices):
        levels = levels_of(cost, tiers)
        levels = replace(levels, longest_tokens=1 + _longest_fitting(trace, lambda tokens: levels.holds(tokens + 1)))
        store = SequenceStore(levels.with_instant_copies() if policy.free else levels)
        return Engine(policy, cost, slo_s, admission, trace, store)
    longest = _longest_fitting(trace, lambda tokens: tokens <= cost.longest_tokens)
    engine = Engine(policy, cost, slo_s, admission, trace, longest_tokens=longest)
    if tiers.host is not None:
        engine.host_bytes = tiers.host
    if events or policy.has_layers or not policy.strided:
        machine = machine_of(cost, tiers, UNLIMITED if tiers.page_cache is None else tiers.page_cache)
        engine.events = EventTimer(policy, cost, machine, longest)
    return engine


def _longest_fitting(trace: Trace, fits: Callable[[int], bool]) -> int:
    """Length of the longest request that fits, tokens."""
    return max((request.tokens for request in trace.requests if fits(request.tokens)), default=0)


def levels_of(cost: ServingCost, tiers: TierLimits, longest_tokens: int = 0) -> Levels:
    """Tiers for whole sequences, with the cost model of the machine.

    Args:
        cost: Cost model of the machine.
        tiers: Limits of the device and host memory.
        longest_tokens: Length of the longest request, tokens.
    """
    token_bytes = cost.layers * round(cost.token_bytes)
    device, host = (UNLIMITED if limit is None else max(1, limit) for limit in (tiers.device, tiers.host))
    rate = token_bytes / max(cost.fetch_token_s, 1e-15)
    return Levels(
        token_bytes=token_bytes,
        block_tokens=BLOCK_TOKENS,
        device_bytes=device,
        host_bytes=host,
        flash_bytes=UNLIMITED,
        host_bytes_per_s=rate,
        host_start_s=cost.fetch_s,
        flash_bytes_per_s=rate * FLASH_SHARE,
        longest_tokens=longest_tokens + 1,
    )
