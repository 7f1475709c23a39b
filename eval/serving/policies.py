"""Any policy on any trace in modelled time: ours, a plug-in's, or one of a Python file, on one machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kv_cache import trace as traces
from kv_cache.admission import AdmissionConfig
from kv_cache.block_table import PolicyError
from kv_cache.cost import ServingCost
from kv_cache.engine import Engine
from kv_cache.hardware import CSD, DEVICE, DIRECT, HOST
from kv_cache.limits import TierLimits
from kv_cache.metrics import summary
from kv_cache.planner.problem import BLOCK_TOKENS
from kv_cache.policies import POLICIES, policy_of
from kv_cache.policies.time_slices import TimeSlices
from kv_cache.scheduler import Policy
from kv_cache.simulation import engine_for
from kv_cache.trace import Trace
from kv_cache.transfer.sequences import Level
from vcsd.progress import Tick, progress
from vcsd.tables import table
from vcsd.timeline import check_timeline_path
from vcsd_eval.experiment import Outcome
from vcsd_eval.public_trace import OptionalTrace, read_trace
from vcsd_eval.serving.machines import COSTS, drives
from vcsd_eval.serving.timeline import PolicyTimeline

INPUT, OUTPUT, PER_S = (96, 6144), (8, 64), 0.5  # tokens and rate of generated requests
EVERY = "all"
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """The requests, and the machine."""

    policy: Annotated[str, typer.Option(help=f"comma-separated names ({', '.join(POLICIES)}), FILE:NAME, or all")] = (
        EVERY
    )
    trace: OptionalTrace = None
    requests: Annotated[
        int, typer.Option(min=1, max=1 << 20, help="number of requests, from the start of the trace")
    ] = 16
    engine: Annotated[str, typer.Option(help="machine: " + ", ".join(COSTS))] = "a5000"
    device_gb: Annotated[
        float | None, typer.Option(min=0.001, max=1e6, help="GPU memory for the KV cache, GB (default: the machine's)")
    ] = None
    host_gb: Annotated[
        float | None, typer.Option(min=0, max=1e6, help="host memory for the KV cache, GB (default: unlimited)")
    ] = None
    page_cache_gb: Annotated[
        float | None, typer.Option(min=0, max=1e6, help="page cache for files, GB (default: unlimited)")
    ] = None
    drives: Annotated[int, typer.Option(min=1, max=64, help="number of drives, for policies that attend in drives")] = 1
    max_batch_size: Annotated[
        int, typer.Option(min=1, max=256, help="largest number of concurrent requests, in prefill or decode")
    ] = 4
    time_slice_tokens: Annotated[
        int, typer.Option(min=1, max=1 << 20, help="length of a time slice, tokens, for policies with time slices")
    ] = 32
    slo_scale: Annotated[
        float,
        typer.Option(min=0.1, max=1000, help="SLO, in multiples of the step time of the longest request that fits"),
    ] = 1.5
    events: Annotated[
        bool,
        typer.Option(
            "--events",
            help="simulate by events instead of the compiled chain; also times placement changes (takes minutes)",
        ),
    ] = False
    timeline: Annotated[
        Path | None, typer.Option(help="file for the run in simulated time, a trace for Perfetto (.json); one policy")
    ] = None

    def names(self) -> list[str]:
        """Policies to run."""
        return list(POLICIES) if self.policy == EVERY else [name.strip() for name in self.policy.split(",")]

    def served(self, cost: ServingCost) -> Trace:
        """The trace, with arrivals in seconds."""
        if self.trace is None:
            return traces.generate(self.requests, PER_S, INPUT, OUTPUT, cv=1.0, longest=8_000)
        return read_trace(self.trace).head(self.requests).in_seconds(cost.slo_s(1.0))

    def machine(self) -> tuple[ServingCost, TierLimits]:
        """Costs, and bytes by tier."""
        cost = COSTS[self.engine]
        block_bytes = BLOCK_TOKENS * cost.layers * cost.token_bytes
        if self.device_gb is not None:
            cost = cost.with_room(int(self.device_gb * 1e9))
        host, cache = (None if gb is None else int(gb * 1e9) for gb in (self.host_gb, self.page_cache_gb))
        return cost, TierLimits(int(cost.room_blocks * block_bytes), host, cache)


def run(name: str, policy: Policy, options: PolicyOptions, trace: Trace, tick: Tick) -> Row:
    """A trace under a policy, as a row.

    Raises:
        ValueError: The policy raises an exception, or no request fits.
    """
    cost, tiers = options.machine()
    if isinstance(policy, TimeSlices):
        policy.slice_tokens = options.time_slice_tokens
    if CSD in policy.tiers:
        cost = replace(cost, drives=drives(options.drives))
    admission = AdmissionConfig(max_batch_size=options.max_batch_size, reject=True)
    by_events = options.events or options.timeline is not None
    engine = engine_for(trace, cost, policy, cost.slo_s(options.slo_scale), admission, tiers, by_events)
    timeline = PolicyTimeline(engine.events) if options.timeline and engine.events else None
    ended = 0

    def told(done: int) -> None:
        nonlocal ended
        for _ in range(ended, done):
            tick(None)
        ended = max(ended, done)

    try:
        totals = summary(engine.run(told))
    except (PolicyError, RuntimeError) as error:
        raise ValueError(f"{name}: {error}") from None
    except Exception as error:  # any exception of a user's policy
        raise ValueError(f"{name}: {type(error).__name__}: {error}") from error
    told(len(trace.requests))
    if not totals["requests"]:
        engine.check(trace.requests[0])
        raise ValueError(f"{name}: no request was served")
    drawn = {"timeline": timeline.write(options.timeline)} if timeline and options.timeline else {}
    return drawn | {
        "policy": name,
        "timed_by": engine.done.timed_by,
        "decode_s": engine.done.decode_s,
        "prefill_s": engine.done.prefill_s,
        "stalled_s": engine.done.stalled_s + _stalled_s(engine),
        "fetched_bytes": None if engine.store else engine.done.link_bytes,
        "route_bytes": _route_bytes(engine),
        **totals,
    }


def check_timeline(path: Path, policies: Mapping[str, Policy]) -> None:
    """Raise ValueError if a timeline of these policies cannot be written."""
    if path.suffix != ".json":
        raise ValueError(f"{path}: must end in .json")
    check_timeline_path(path)
    if len(policies) > 1:
        raise ValueError(f"--timeline shows one policy, and there are {len(policies)}: name one with --policy")
    if any(isinstance(policy, TimeSlices) for policy in policies.values()):
        raise ValueError("--timeline needs simulated copies, which policies with time slices do not have")


def _stalled_s(engine: Engine) -> float:
    """Seconds in which the model waited for copies."""
    return sum(engine.events.transfers.stalls_ns.values()) / 1e9 if engine.events else 0.0


def _route_bytes(engine: Engine) -> dict[str, float]:
    """Bytes of the KV cache by route; of time slices in both directions."""
    if engine.events is not None:
        return {route: float(counts.bytes) for route, counts in engine.events.runner.traffic.items()}
    if engine.store is not None:
        names = {Level.HOST: f"{DEVICE}<>{HOST}", Level.FLASH: f"{HOST}<>{DIRECT}"}
        return {name: float(engine.store.link_stats[level].bytes) for level, name in names.items()}
    return {f"{HOST}>{DEVICE}": engine.done.link_bytes}


def experiment(options: PolicyOptions) -> Outcome:
    """Policies compared on one trace and one machine, in modelled time."""
    if options.engine not in COSTS:
        raise ValueError(f"engine = {options.engine!r}: must be one of {', '.join(COSTS)}")
    policies = {name: policy_of(name) for name in options.names()}
    if options.timeline:
        check_timeline(options.timeline, policies)
    cost, _ = options.machine()
    trace = options.served(cost)
    if not trace.requests:
        raise ValueError(f"trace {options.trace}: has no requests")
    rows, failed = list[Row](), list[Row]()
    with progress("requests", len(policies) * len(trace.requests)) as tick:
        for name, policy in policies.items():
            try:
                rows.append(run(name, policy, options, trace, tick))
            except ValueError as error:
                if len(policies) == 1:
                    raise
                failed.append({"policy": name, "error": str(error)})
    result = {"engine": cost.name, "trace": trace.name, "requests": len(trace.requests)}
    result |= {"slo_s": cost.slo_s(options.slo_scale), "rows": rows, "failed": failed}
    return Outcome(result, [_table(cost, trace, rows)], [row["error"] for row in failed], failed=bool(failed))


def _table(cost: ServingCost, trace: Trace, rows: list[Row]) -> Any:
    columns = ("policy", "TTFT p50 s", "TPOT p50 ms", "TBT p99 ms", "tokens/s", "end s", "rejected", "GB fetched")
    shown = [
        (
            row["policy"],
            f"{row['ttft_s']['p50']:,.2f}",
            f"{row['tpot_s']['p50'] * 1e3:,.1f}",
            f"{row['tbt_s']['p99'] * 1e3:,.1f}",
            f"{row['tokens_per_s']:,.1f}",
            f"{row['makespan_s']:,.1f}",
            f"{row['rejected']:,}",
            "-" if row["fetched_bytes"] is None else f"{row['fetched_bytes'] / 1e9:,.2f}",
            " ".join(row["timed_by"]),
        )
        for row in rows
    ]
    return table(f"{trace.name} on {cost.name}", (*columns, "timed by"), shown, left=("policy", "timed by"))
