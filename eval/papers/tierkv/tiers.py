"""TierKV's policies, and ours, under requests that share a GPU by time slices: tokens/s over host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from eval.experiment import Outcome
from eval.options import Picture, check_picture, numbers
from eval.papers import options
from eval.papers.machines import overlay
from eval.papers.profiles import Gpu, Host, Model, Ssd
from eval.papers.tierkv.blocks import BLOCK_TOKENS, block_bytes
from eval.plot import lines, save_figure
from kv_cache.cost import CostModel
from kv_cache.tiered.machine import Machine
from kv_cache.tiered.policies import POLICIES
from kv_cache.tiered.run import check, serve
from kv_cache.trace import Trace, generate, load
from vcsd.progress import Tick, progress
from vcsd.tables import flat_table, table

USED = 0.9  # of the GPU's memory, by weights and K and V; the rest is for activations
INPUT, OUTPUT = (700, 2000), (128, 400)  # tokens of generated requests
REACTIVE, LITERAL, MENDED, ORACLE = ("lru", "lfu", "static"), "tierkv", "mended", "oracle"
Row = dict[str, Any]


def machine(model: Model, gpu: Gpu, host: Host, ssd: Ssd) -> Machine:
    """A model on a GPU that leaves a room for K and V, and takes the host's memory and the SSD for more."""
    room = int(USED * gpu.memory_gib * 2**30 - model.weight_bytes)
    if room <= 0:
        raise ValueError(f"gpu = {gpu.name}: {gpu.memory_gib:g} GiB leave nothing beside the weights of {model.name}")
    return Machine(
        cost=CostModel.of(model, gpu.accelerator, overlay("tierkv")),
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


def requests(path: Path | None, count: int, rate: float | None, seed: int, step_s: float) -> Trace:
    """Generated requests, which all come at once unless there is a rate, or a trace's first; step_s: of its engine,
    where it counts steps."""
    if path is None:
        made = generate(count, rate or 1.0, INPUT, OUTPUT, seed=seed)
        return made if rate else replace(made, requests=[replace(each, arrival=0.0) for each in made.requests])
    if rate is not None:
        raise ValueError("--rate is of generated requests, and a trace has arrivals of its own")
    return load(path).head(count).in_seconds(step_s)


def sweep(machines: Sequence[Machine], trace: Trace, slices: Sequence[int], tick: Tick) -> list[Row]:
    """A row for each slice, machine and policy."""
    rows = []
    for tokens, at in product(slices, machines):
        for policy in POLICIES.values():
            served = serve(trace, at, policy, tokens)
            rows.append(
                {
                    "slice": tokens,
                    "dram_gb": at.host_bytes / 1e9,
                    **asdict(served),
                    "tokens_per_s": served.tokens_per_s,
                }
            )
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
        "mended_over_better_of_both_most": max(over_best.values()),
        "mended_over_oracle_least": min(run[MENDED] / run[ORACLE] for run in runs.values()),
    }


SHOWN: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("tokens/s", lambda row: f"{row['tokens_per_s']:,.0f}"),
    ("GB over NVMe", lambda row: f"{row['flash_bytes'] / 1e9:,.0f}"),
    ("longest wait for a slice, s", lambda row: f"{row['wait_s']:,.1f}"),
    ("tokens in one stay", lambda row: f"{row['stay_tokens']:,.0f}"),
)


def _tables(rows: Sequence[Row]) -> list[Any]:
    """A table for each figure, with a column for each policy."""
    made = []
    for title, cell in SHOWN:
        lines_of: dict[tuple[str, str], list[str]] = {}
        for row in rows:
            lines_of.setdefault((str(row["slice"]), f"{row['dram_gb']:g}"), []).append(cell(row))
        columns = ("slice", "DRAM, GB", *POLICIES)
        made.append(table(title, columns, [[*at, *cells] for at, cells in lines_of.items()], left=("slice",)))
    return made


def experiment(
    profiles: options.Machine,
    ssd: Annotated[str, typer.Option(help="SSD profile: a name or a YAML file")] = "tierkv",
    dram_gb: Annotated[str, typer.Option(help="host memory for K and V, GB, with commas")] = "4,8,16,32,64,96,128,512",
    slices: Annotated[str, typer.Option(help="tokens in a time slice, with commas")] = "20,50,100,200",
    trace: Annotated[Path | None, typer.Option(help="requests: Splitwise's CSV, Mooncake's JSON lines")] = None,
    count: Annotated[int, typer.Option("--requests", min=1, max=1 << 20, help="requests, a trace's first")] = 135,
    rate: Annotated[float | None, typer.Option(min=1e-3, max=1e6, help="a second (default: all at once)")] = None,
    seed: Annotated[int, typer.Option(min=0, max=1 << 32, help="of generated requests")] = 1,
    plot: Picture = None,
) -> Outcome:
    """KV in three tiers under requests that share a GPU: TierKV's policies and ours, over host memory."""
    check_picture(plot)
    rooms, each_slice = numbers("dram_gb", dram_gb, float), numbers("slices", slices)
    one = machine(*profiles.profiles("llama-2-13b", "h100", "tierkv"), Ssd.load(ssd))
    served = requests(trace, count, rate, seed, one.cost.linear_s())
    machines = [replace(one, host_bytes=int(room * 1e9)) for room in rooms]
    for at in machines:
        check(served.requests, at)
    with progress("runs", len(machines) * len(each_slice) * len(POLICIES)) as tick:
        rows = sweep(machines, served, each_slice, tick)
    if plot:
        save_figure(
            lines([row for row in rows if row["slice"] == each_slice[0]], "dram_gb", "tokens_per_s", "policy"), plot
        )
    found = summary(rows)
    wanted = sum(one.bytes_of(each.tokens + 1) for each in served.requests)
    result = {"requests": len(served.requests), "oversubscription": wanted / one.device_bytes, **found}
    return Outcome({**result, "rows": rows}, [*_tables(rows), flat_table("Tiers", result), _stays(rows)])


def _stays(rows: Sequence[Row]) -> str:
    """Stays of our policy compared with the slices."""
    stays, slices = [row["stay_tokens"] for row in rows if row["policy"] == MENDED], [row["slice"] for row in rows]
    return (
        f"ratios are at unequal stay: {MENDED} keeps a request for {min(stays):,.0f} to {max(stays):,.0f} tokens, "
        f"the slices asked for are {min(slices):,} to {max(slices):,}"
    )
