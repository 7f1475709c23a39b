"""A trace served in modelled time by any policy: with the room, the links and the tiers that it needs."""

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

UNLIMITED = 1 << 40  # bytes, of a tier without a limit
FLASH_SHARE = 0.25  # of the link to host memory, that flash is as fast as


def simulate(
    trace: Trace,
    cost: ServingCost,
    policy: Policy,
    slo_s: float,
    admission: AdmissionConfig = AdmissionConfig(),
    tick: Callable[[int], object] = lambda done: None,
    tiers: TierLimits | None = None,
) -> RunResult:
    """Serve a trace in modelled time.

    Arrivals in engine steps are counted in decode steps, so a slow engine gets fewer in the same time.

    Args:
        trace: Requests.
        cost: Costs of the machine.
        policy: Decides.
        slo_s: The objective, seconds between tokens.
        admission: How requests are admitted.
        tick: Called now and then with the number of finished requests.
        tiers: Bytes of each tier; None: the device's follow from the cost, and there is as much as wanted elsewhere.

    Raises:
        ValueError: A request never fits the device, and `admission` does not reject such.
        PolicyError: The policy does what no policy may.
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
    """The engine of `simulate`, before its first iteration. events: time every policy that can be so by events."""
    if tiers is None:
        tiers = TierLimits(min(UNLIMITED, int(cost.room_blocks * BLOCK_TOKENS * cost.layers * cost.token_bytes)))
    if isinstance(policy, TimeSlices):
        levels = levels_of(cost, tiers)
        levels = replace(levels, longest_tokens=1 + _longest(trace, lambda tokens: levels.holds(tokens + 1)))
        store = SequenceStore(levels.without_copies() if policy.free else levels)
        return Engine(policy, cost, slo_s, admission, trace, store)
    longest = _longest(trace, lambda tokens: tokens <= cost.longest_tokens)
    first_block = min(longest // 2, cost.room_blocks * BLOCK_TOKENS // admission.slots) if policy.first_block else 0
    engine = Engine(policy, cost, slo_s, admission, trace, first_block=first_block)
    if tiers.host is not None:
        engine.host_bytes = tiers.host
    if events or policy.has_layers or not policy.strided:
        machine = machine_of(cost, tiers, UNLIMITED if tiers.page_cache is None else tiers.page_cache)
        engine.events = EventTimer(policy, cost, machine, longest)
    return engine


def _longest(trace: Trace, fits: Callable[[int], bool]) -> int:
    """Tokens of the longest request that fits."""
    return max((each.tokens for each in trace.requests if fits(each.tokens)), default=0)


def levels_of(cost: ServingCost, tiers: TierLimits, longest_tokens: int = 0) -> Levels:
    """Tiers for whole sequences, with the costs of the machine.

    Args:
        cost: Costs of the machine.
        tiers: Bytes of the device and of host memory.
        longest_tokens: Tokens of the longest request.
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
