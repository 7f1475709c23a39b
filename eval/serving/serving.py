"""A trace served by several systems on one machine, in simulated time: SLO attainment and price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kv_cache import trace as traces
from kv_cache.admission import AdmissionConfig
from kv_cache.cost import ServingCost
from kv_cache.planner.problem import BLOCK_TOKENS
from kv_cache.trace import Request, Trace
from vcsd.progress import progress
from vcsd.tables import table
from vcsd_eval.experiment import Outcome
from vcsd_eval.options import RayAddress, check_picture
from vcsd_eval.partial_results import ResultCache, fingerprint
from vcsd_eval.plot import lines, save_figure
from vcsd_eval.public_trace import OptionalTrace, read_trace
from vcsd_eval.serving.machines import COSTS
from vcsd_eval.serving.pages_error import output_error
from vcsd_eval.serving.systems import OTHERS, PARTS, SYSTEMS, Run, run
from vcsd_eval.sweep import Done, cores, sweep, sweep_on_ray, sweep_rest

LENGTHS = (96, 9216)  # tokens of generated requests
GENERATED_PER_S = 0.01  # at load 1
MANY = 5_000  # requests of all runs, for which processes are worth their start
WORTH = (
    "deadline_attainment",
    "tbt_slo_attainment_step",
    "tbt_slo_attainment",
    "tpot_slo_attainment_step",
    "end_to_end_s",
    "requests_per_min",
)
TAILS = {"ttft_s": 1.0, "tpot_s": 1e3, "tbt_s": 1e3}
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AdmissionOptions:
    """Admission options."""

    max_batch_size: Annotated[
        int, typer.Option(min=1, max=256, help="largest number of concurrent requests, in prefill or decode")
    ] = 4
    prefill_chunk_tokens: Annotated[
        int,
        typer.Option(
            min=0, max=1 << 24, help="prefill chunk per decode step, tokens; 0: whole prompts, decoding waits"
        ),
    ] = 0
    order: Annotated[
        Literal["fcfs", "srtf"], typer.Option(help="admission order: by arrival, or shortest remaining time first")
    ] = "fcfs"
    aging_factor: Annotated[
        float,
        typer.Option(
            min=0, max=1e9, help="srtf: aging limit on overtaking, in multiples of a request's own service time"
        ),
    ] = 10.0
    max_queued_requests: Annotated[
        int | None,
        typer.Option(min=1, max=1 << 20, help="queue length limit, further requests are rejected (default: unlimited)"),
    ] = None
    reject: Annotated[
        bool, typer.Option("--reject", help="reject a request that is too long, instead of ending the run")
    ] = False

    max_paused_steps: Annotated[
        int | None,
        typer.Option(min=1, max=1 << 20, help="longest pause of a request by a policy, steps (default: unlimited)"),
    ] = None

    @property
    def admission(self) -> AdmissionConfig:
        return AdmissionConfig(
            max_batch_size=self.max_batch_size,
            prefill_chunk_tokens=self.prefill_chunk_tokens,
            order=self.order,
            aging_factor=self.aging_factor,
            max_queued_requests=self.max_queued_requests,
            reject=self.reject,
            max_paused_steps=self.max_paused_steps,
        )


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """Trace, arrival rates, and machine."""

    trace: OptionalTrace = None
    load: Annotated[
        str,
        typer.Option(
            help="comma-separated rates relative to the trace's own (1,2); for OrbitFlow's file, the trace to use (2.0)"
        ),
    ] = "2.0"
    slo_scale: Annotated[
        str,
        typer.Option(
            help="comma-separated SLOs, in multiples of the step time of the longest request that fits (1,1.5,2.5)"
        ),
    ] = "1.5"
    arrivals: Annotated[
        Literal["seconds", "steps"],
        typer.Option(
            help="time unit of a trace in engine steps: with steps, a slow engine gets fewer requests per second"
        ),
    ] = "seconds"
    requests: Annotated[
        int, typer.Option(min=0, max=1 << 20, help="number of requests, from the start of the trace; 0: all")
    ] = 0
    engine: Annotated[str, typer.Option(help="machine: " + ", ".join(COSTS))] = "a5000"
    systems: Annotated[str, typer.Option(help="systems: ours, or all (adds OrbitFlow's baselines)")] = "ours"
    picture: Annotated[Path | None, typer.Option(help="picture file of SLO attainment over the load")] = None
    jobs: Annotated[
        int | None, typer.Option(min=1, max=1024, help="number of processes (default: one per core for large runs)")
    ] = None
    ray: RayAddress = None
    progress_dir: Annotated[
        Path | None,
        typer.Option("--checkpoint-dir", help="folder for intermediate results, used to continue a killed run"),
    ] = Path("build/serving")

    def at(self, load: float, cost: ServingCost) -> Trace:
        """The trace at a load."""
        if self.trace is None:
            count = self.requests or 52
            return traces.generate(count, GENERATED_PER_S * load, LENGTHS, LENGTHS, cv=1.0, longest=12_000)
        trace = read_trace(self.trace, f"lambda{load:.1f}x").head(self.requests)
        if trace.unit == "s":
            return _faster(trace, load)
        return trace if self.arrivals == "steps" else trace.in_seconds(cost.slo_s(1.0))

    def kept(self, letting: AdmissionOptions) -> ResultCache:
        """Rows of an earlier run with the same options that was killed."""
        parts = replace(self, picture=None, jobs=None, ray=None, progress_dir=None), letting
        files = [self.trace] if self.trace else []
        return ResultCache(self.progress_dir and self.progress_dir / f"{fingerprint(parts, files)}.jsonl")

    def runs(self, admission: AdmissionConfig) -> list[Run]:
        """All runs: each load, each objective, each system. Raises ValueError for an invalid combination."""
        systems = SYSTEMS | OTHERS if self.systems == "all" else SYSTEMS
        loads, scales = _numbers("load", self.load, 1e-6), _numbers("slo_scale", self.slo_scale, 0.1)
        runs = []
        for load in loads:
            cost = COSTS[self.engine]
            trace = self.at(load, cost)
            cost = replace(cost, room_blocks=trace.slo_tokens // BLOCK_TOKENS) if trace.slo_tokens else cost
            if not admission.reject:
                _check(cost, trace)
            runs += [Run(name, load, scale, trace, cost, admission) for scale, name in product(scales, systems)]
        return runs


def _numbers(name: str, text: str, least: float) -> list[float]:
    """Numbers of an option; raises ValueError for an invalid one."""
    try:
        values = [float(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} = {text!r}: needs numbers with commas between them") from None
    if not all(least <= number <= 1000 for number in values):
        raise ValueError(f"{name} = {text!r}: each must be at least {least:g}, and at most 1000")
    if len(set(values)) < len(values):
        raise ValueError(f"{name} = {text!r}: names one twice")
    return values


def _check(cost: ServingCost, trace: Trace) -> None:
    try:
        cost.check(trace.requests)
    except ValueError as error:
        raise ValueError(f"{error}: --engine names another machine, --reject serves the others") from None


def _faster(trace: Trace, load: float) -> Trace:
    requests: list[Request] = [replace(request, arrival=request.arrival / load) for request in trace.requests]
    return replace(trace, requests=requests)


def experiment(load: TraceLoad, letting: AdmissionOptions = AdmissionOptions()) -> Outcome:
    """Requests that come and go, served by several systems: deadlines, tails, throughput."""
    if load.engine not in COSTS:
        raise ValueError(f"engine = {load.engine!r}: must be one of {', '.join(COSTS)}")
    if load.systems not in ("ours", "all"):
        raise ValueError(f"systems = {load.systems!r}: must be ours or all")
    if load.ray and load.jobs:
        raise ValueError("--jobs and --ray: processes of this machine, or a cluster")
    check_picture(load.picture)
    runs = load.runs(letting.admission)
    systems = SYSTEMS | OTHERS
    errors = {name: output_error(name) for name in sorted({each.layout for each in systems.values() if each.drives})}
    rows = []
    kept = load.kept(letting)
    for each, outcome in zip(runs, _side_by_side(load, runs, kept), strict=True):
        system = systems[each.system]
        rows.append({**outcome, "output_error": errors[system.layout] if system.drives else 0.0})
    kept.close()
    last = runs[-1]
    result = {
        "engine": COSTS[load.engine].name,
        "arrivals": load.arrivals,
        "slo_scale": last.scale,
        "slo_s": last.slo_s,
        "systems": {row["system"]: row for row in rows if (row["load"], row["slo_scale"]) == (last.load, last.scale)},
        "rows": rows,
    }
    if load.picture:
        save_figure(_picture(rows), load.picture)
    return Outcome(result, [_worth(load, rows), _tails(rows), _paths(rows)])


def _side_by_side(load: TraceLoad, runs: Sequence[Run], results: ResultCache) -> list[Row]:
    """Rows of all runs; those that an earlier run has kept are not done again."""

    def compute(left: Sequence[Run], done: Done) -> None:
        with progress("parts of runs", PARTS * len(left)) as tick:
            if load.ray:
                sweep_on_ray(run, left, load.ray, tick, done)
            else:
                many = sum(len(each.trace.requests) for each in left) >= MANY
                sweep(run, left, load.jobs or (cores() if many else 1), tick, done)

    return sweep_rest(runs, results, compute)


def _picture(rows: Sequence[Row]) -> Any:
    """Deadlines met over the load, a line for each system, and each objective where there are several."""
    several = len({row["slo_scale"] for row in rows}) > 1
    names = [f"{row['system']}, x {row['slo_scale']:g}" if several else row["system"] for row in rows]
    named = [{**row, "name": name} for row, name in zip(rows, names, strict=True)]
    figure = lines(named, "load", "deadline_attainment", "name")
    figure.axes[0].set(xlabel="load, over the trace's rate", ylabel="share of tokens that meet their deadlines")
    figure.axes[0].set_ylim(0, 1.02)
    return figure


def _at(row: Row) -> tuple[str, str, str]:
    return f"{row['load']:g}", f"{row['slo_scale']:g}", row["system"]


def _worth(load: TraceLoad, rows: Sequence[Row]) -> Any:
    shown = [(*_at(row), *(f"{row[key]:.3f}" for key in WORTH), f"{row['output_error']:.4f}") for row in rows]
    columns = ("load", "x", "system", "deadlines met", "TBT", "by gaps", "TPOT", "end to end s", "requests/min")
    title = f"{rows[0]['trace']} on {COSTS[load.engine].name}, objective x"
    return table(title, (*columns, "error"), shown, left=("system",))


def _tails(rows: Sequence[Row]) -> Any:
    """How long users wait for the first token, for one, and between two."""
    columns = [f"{name} p{percentile}" for name in ("TTFT s", "TPOT ms", "TBT ms") for percentile in (50, 95, 99)]
    shown = []
    for row in rows:
        times = [value * scale for key, scale in TAILS.items() for value in row[key].values()]
        shown.append((*_at(row), *(f"{time:,.1f}" for time in times)))
    return table("Latencies", ("load", "x", "system", *columns), shown, left=("system",))


def _paths(rows: Sequence[Row]) -> Any:
    """Table of generated tokens, bytes per path, longest wait, and rejected requests."""
    columns = ("load", "x", "system", "tokens/s", "GB over the host link", "GB in drives")
    waits = ("longest wait s", "longest pause s", "rejected")
    shown = [
        (
            *_at(row),
            f"{row['tokens_per_s']:,.1f}",
            *(f"{row['path_bytes'][path] / 1e9:,.1f}" for path in ("host_link", "drives")),
            *(f"{row[key]:,.1f}" for key in ("max_queue_wait_s", "max_token_gap_s")),
            f"{row['rejected']:,}",
        )
        for row in rows
    ]
    return table("Throughput, K and V read by path, waiting", (*columns, *waits), shown, left=("system",))
