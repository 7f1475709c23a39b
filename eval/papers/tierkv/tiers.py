"""TierKV's policies, and ours, under requests that share a GPU by time slices: tokens/s over host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any

import typer

from kv_cache.cost import CostModel, ServingCost
from kv_cache.engine import Engine
from kv_cache.policies import policy_of
from kv_cache.policies.time_slices import TimeSlices
from kv_cache.trace import Trace, generate
from kv_cache.transfer.sequences import Level, Levels, SequenceStore
from vcsd.progress import Tick, progress
from vcsd.tables import flat_table, table
from vcsd_eval.experiment import Outcome
from vcsd_eval.options import Picture, check_picture, numbers
from vcsd_eval.papers import options
from vcsd_eval.papers.machines import overlay
from vcsd_eval.papers.profiles import Gpu, Host, Model, Ssd
from vcsd_eval.papers.tierkv.blocks import BLOCK_TOKENS, block_bytes
from vcsd_eval.plot import lines, save_figure
from vcsd_eval.public_trace import OptionalTrace, read_trace

USED = 0.9  # of the GPU's memory, for weights and KV cache; the rest is for activations
INPUT, OUTPUT = (700, 2000), (128, 400)  # tokens of generated requests
REACTIVE, LITERAL, MENDED, ORACLE = ("lru", "lfu", "static"), "tierkv", "mended", "oracle"
COMPARED = (*REACTIVE, LITERAL, MENDED, ORACLE)
Row = dict[str, Any]


def machine(model: Model, gpu: Gpu, host: Host, ssd: Ssd) -> tuple[ServingCost, Levels]:
    """A model on a GPU with room for some KV cache; the host's memory and an SSD hold the rest."""
    room = int(USED * gpu.memory_gib * 2**30 - model.weight_bytes)
    if room <= 0:
        raise ValueError(
            f"gpu = {gpu.name}: {gpu.memory_gib:g} GiB are filled by the weights of {model.name}: choose a larger --gpu"
        )
    cost = ServingCost(
        name=gpu.name,
        compute=CostModel.of(model, gpu.accelerator, overlay("tierkv")),
        fetch_s=0.0,
        fetch_token_s=block_bytes(model, 1) / (host.gpu_link_gb_per_s * 1e9),
        room_blocks=1 << 40,  # unlimited: the policy manages capacity
    )
    return cost, Levels(
        token_bytes=block_bytes(model, 1),
        block_tokens=BLOCK_TOKENS,
        device_bytes=room,
        host_bytes=int(host.dram_gib * 2**30),
        flash_bytes=int((ssd.capacity_tb or 1) * 1e12),
        host_bytes_per_s=host.gpu_link_gb_per_s * 1e9,
        host_start_s=host.gpu_link_us * 1e-6,
        flash_bytes_per_s=min(ssd.read_gb_per_s, ssd.write_gb_per_s) * 1e9,
        flash_start_s=ssd.random_read_us * 1e-6,
    )


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Generated requests, which all come at once unless there is a rate, or a trace's first."""

    trace: OptionalTrace = None
    count: Annotated[
        int, typer.Option("--requests", min=1, max=1 << 20, help="number of requests, from the start of a trace")
    ] = 135
    rate: Annotated[
        float | None, typer.Option(min=1e-3, max=1e6, help="arrival rate, requests per second (default: all at once)")
    ] = None
    seed: Annotated[int, typer.Option(min=0, max=1 << 32, help="random seed of generated requests")] = 1

    def requests(self, step_s: float) -> Trace:
        """Arrivals in seconds; step_s: of a trace's engine, where it counts steps."""
        if self.trace:
            if self.rate is not None:
                raise ValueError("--rate has no effect with --trace, which has its own arrivals: leave one of them out")
            return read_trace(self.trace).head(self.count).in_seconds(step_s)
        trace = generate(self.count, self.rate or 1.0, INPUT, OUTPUT, seed=self.seed)
        if self.rate:
            return trace
        return replace(trace, requests=[replace(request, arrival=0.0) for request in trace.requests])


def served(trace: Trace, cost: ServingCost, levels: Levels, name: str, slice_tokens: int) -> Row:
    """All requests of a trace under a policy that takes turns, to their ends.

    Returns:
        Its figures. hit_share: entries of sequences with a KV cache that found it on the device. stalled_share: of the
        time, in which all waited for copies. wait_s: the longest before a slice. stay_tokens: mean tokens of a stay.
    """
    policy = policy_of(name)
    assert isinstance(policy, TimeSlices)
    policy.slice_tokens = slice_tokens
    longest = max(request.tokens + 1 for request in trace.requests)
    store = SequenceStore(replace(levels.with_instant_copies() if policy.free else levels, longest_tokens=longest))
    done = Engine(policy, cost, trace=trace, store=store).run()
    counts, tokens = policy.counts, sum(request.output_tokens for request in trace.requests)
    return {
        "policy": name,
        "requests": len(trace.requests),
        "tokens": tokens,
        "seconds": done.end_s,
        "host_bytes": store.link_stats[Level.HOST].bytes,
        "flash_bytes": store.link_stats[Level.FLASH].bytes,
        "wasted_bytes": counts.wasted_bytes,
        "recomputed_tokens": counts.recomputed_tokens,
        "hit_share": counts.hits / counts.entries if counts.entries else None,
        "stalled_share": (counts.stalled_s + done.stalled_s) / done.end_s,
        "wait_s": counts.longest_wait_s,
        "stay_tokens": tokens / counts.stays,
        "tokens_per_s": tokens / done.end_s,
    }


def check(trace: Trace, levels: Levels) -> None:
    """Raise ValueError for a request that one of the tiers cannot hold."""
    largest = max(trace.requests, key=lambda request: request.tokens)
    levels.check(largest.tokens + 1, largest.number)


def sweep(cost: ServingCost, machines: Sequence[Levels], trace: Trace, slices: Sequence[int], tick: Tick) -> list[Row]:
    """A row for each slice, machine and policy."""
    rows = []
    for tokens, at in product(slices, machines):
        for name in COMPARED:
            rows.append({"slice": tokens, "dram_gb": at.host_bytes / 1e9, **served(trace, cost, at, name, tokens)})
            tick(None)
    return rows


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The least of ratios of tokens/s over runs, where all policies serve the same."""
    runs: dict[tuple[int, float], dict[str, float]] = {}
    for row in rows:
        runs.setdefault((row["slice"], row["dram_gb"]), {})[row["policy"]] = row["tokens_per_s"]
    reactive = {at: max(run[name] for name in REACTIVE) for at, run in runs.items()}
    slower = [at for at, run in runs.items() if run[LITERAL] < reactive[at]]
    over_best = {at: run[MENDED] / max(run[LITERAL], reactive[at]) for at, run in runs.items()}
    return {
        "runs": len(runs),
        "literal_slower_than_reactive": len(slower),
        "literal_over_reactive_least": min(run[LITERAL] / reactive[at] for at, run in runs.items()),
        "literal_over_static_least": min(run[LITERAL] / run["static"] for run in runs.values()),
        "mended_over_better_of_both_least": min(over_best.values()),
        "mended_over_better_of_both_least_where_literal_is_slower": min((over_best[at] for at in slower), default=None),
        "corrected_over_best_baseline_max": max(over_best.values()),
        "corrected_over_oracle_min": min(run[MENDED] / run[ORACLE] for run in runs.values()),
    }


SHOWN: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("tokens/s", lambda row: f"{row['tokens_per_s']:,.0f}"),
    ("GB over NVMe", lambda row: f"{row['flash_bytes'] / 1e9:,.0f}"),
    ("longest wait for a slice, s", lambda row: f"{row['wait_s']:,.1f}"),
    ("tokens in one stay", lambda row: f"{row['stay_tokens']:,.0f}"),
)


def _tables(rows: Sequence[Row]) -> list[Any]:
    """A table for each figure, with a column for each policy."""
    tables = []
    for title, cell in SHOWN:
        lines_of: dict[tuple[str, str], list[str]] = {}
        for row in rows:
            lines_of.setdefault((str(row["slice"]), f"{row['dram_gb']:g}"), []).append(cell(row))
        columns = ("slice", "DRAM, GB", *COMPARED)
        tables.append(table(title, columns, [[*at, *cells] for at, cells in lines_of.items()], left=("slice",)))
    return tables


def experiment(
    profiles: options.MachineOptions,
    workload: RequestOptions,
    ssd: Annotated[str, typer.Option(help="SSD profile: a name or a YAML file")] = "tierkv",
    dram_gb: Annotated[
        str, typer.Option(help="comma-separated sizes of host memory for the KV cache, GB")
    ] = "4,8,16,32,64,96,128,512",
    slices: Annotated[str, typer.Option(help="comma-separated lengths of a time slice, tokens")] = "20,50,100,200",
    plot: Picture = None,
) -> Outcome:
    """KV in three tiers under requests that share a GPU: TierKV's policies and ours, over host memory."""
    check_picture(plot)
    rooms, slice_tokens = numbers("dram_gb", dram_gb, float), numbers("slices", slices)
    cost, one = machine(*profiles.profiles("llama-2-13b", "h100", "tierkv"), Ssd.load(ssd))
    trace = workload.requests(cost.compute.linear_s())
    machines = [replace(one, host_bytes=int(room * 1e9)) for room in rooms]
    for at in machines:
        check(trace, at)
    with progress("runs", len(machines) * len(slice_tokens) * len(COMPARED)) as tick:
        rows = sweep(cost, machines, trace, slice_tokens, tick)
    if plot:
        save_figure(
            lines([row for row in rows if row["slice"] == slice_tokens[0]], "dram_gb", "tokens_per_s", "policy"), plot
        )
    totals = summary(rows)
    wanted = sum(one.bytes_of(request.tokens + 1) for request in trace.requests)
    result = {"requests": len(trace.requests), "oversubscription": wanted / one.device_bytes, **totals}
    return Outcome({**result, "rows": rows}, [*_tables(rows), flat_table("Tiers", result), _stays(rows)])


def _stays(rows: Sequence[Row]) -> str:
    """Stays of our policy compared with the slices."""
    stays, slices = [row["stay_tokens"] for row in rows if row["policy"] == MENDED], [row["slice"] for row in rows]
    return (
        f"ratios are at unequal stay: {MENDED} keeps a request for {min(stays):,.0f} to {max(stays):,.0f} tokens, "
        f"the slices asked for are {min(slices):,} to {max(slices):,}"
    )
