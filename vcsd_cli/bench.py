"""`vcsd bench`: measure the emulator itself, beside its rivals."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from vcsd_cli.shared import Output, OutputOption, err, progress, show, stdout

bench = typer.Typer(help="Measure the emulator itself, beside its rivals.")


@bench.command("decode")
def bench_decode_command(
    tokens: Annotated[int, typer.Option(min=1, help="prompt length")] = 1024,
    steps: Annotated[int, typer.Option(min=1, help="decode steps a run")] = 16,
    drives: Annotated[int, typer.Option(help="virtual drives")] = 2,
    batch: Annotated[int, typer.Option(min=1, help="sequences")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="runs that count")] = 5,
    model: Annotated[Path | None, typer.Option(help="folder of a decoder (default: the shipped one)")] = None,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Wall time of a decode step: ordinary attention against emulated drives."""
    from eval.bench.decode import ATTENTIONS, bench_decode
    from vcsd.generate import CHECKPOINT, load

    loaded, _ = load(model or CHECKPOINT)
    if tokens + steps > loaded.config.max_position_embeddings:
        raise ValueError(f"tokens = {tokens}: the model's context is {loaded.config.max_position_embeddings}")
    with progress("runs", (repeats + 1) * len(ATTENTIONS)) as tick:
        result = bench_decode(loaded, tokens, steps, drives, batch, repeats, tick)
    if output is Output.JSON:
        print(json.dumps(result))
        return
    table = Table(title=f"Decode step, {batch} x {tokens} tokens, {drives} drives (wall time)", title_justify="left")
    table.add_column("attention")
    table.add_column("ms", justify="right")
    table.add_column("of sdpa's", justify="right")
    for name, ms in result["step_ms"].items():
        table.add_row(name, f"{ms:.1f}", f"{result['wall_over_sdpa'][name]:.2f}x")
    stdout().print(table)


@bench.command("attention")
def bench_attention_command(
    tokens: Annotated[int, typer.Option(min=16, max=1 << 18, help="length of the sequence")] = 32768,
    heads: Annotated[int, typer.Option(min=1, max=256, help="query heads")] = 40,
    head_dim: Annotated[int, typer.Option(min=8, max=256, help="channels of a head")] = 128,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="KV heads (default: as many as query heads)")] = None,
    method: Annotated[str, typer.Option(help="dense, sparf with r = 16 and k = S/8, or another method")] = "dense",
    threads: Annotated[int, typer.Option(min=1, max=64, help="of the kernel and of its rivals")] = 1,
    all_sizes: Annotated[bool, typer.Option("--sweep", help="dense and SparF over many sizes, as a roofline")] = False,
    plot: Annotated[Path, typer.Option(help="sweep: picture to draw: png, svg or pdf")] = Path("roofline.png"),
    output: OutputOption = Output.NORMAL,
) -> None:
    """Wall time of the attention kernels beside PyTorch's, and the share of the memory's bandwidth that they reach."""
    from eval.bench.attention import ROUNDS, SWEEP_GROUPS, SWEEP_TOKENS, bench_attention, plot_sweep, sweep
    from eval.plot import check_format

    if all_sizes:
        check_format(plot)
        with progress("kernels", 2 * len(SWEEP_TOKENS) * len(SWEEP_GROUPS)) as tick:
            result = sweep(threads, tick)
        plot_sweep(result, plot)
        if output is Output.JSON:
            print(json.dumps(result | {"plot": str(plot)}))
            return
        table = Table(title=f"Roofline, {threads} threads: see {plot}", title_justify="left")
        for column in ("tokens", "queries", "method", "FLOP/byte", "GFLOP/s", "of the roof"):
            table.add_column(column, justify="right")
        for point in result["points"]:
            roof = min(point["flop_per_byte"] * result["read_bandwidth_gb_per_s"], result["peak_gflop_per_s"])
            share = point["gflop_per_s"] / roof
            rates = f"{point['flop_per_byte']:.2f}", f"{point['gflop_per_s']:.1f}", f"{share:.0%}"
            table.add_row(f"{point['tokens']:,}", str(point["group"]), point["method"], *rates)
        stdout().print(table)
        return
    with progress("turns", (6 if method in ("dense", "sparf") else 7) * (ROUNDS + 1)) as tick:
        result = bench_attention(tokens, heads, head_dim, kv_heads or heads, method, threads, tick=tick)
    show("attention", result, output)


class Workload(StrEnum):
    """What `vcsd bench ftl` puts on a drive."""

    RANDREAD = "randread"
    ATTENTION = "attention"
    CHURN = "churn"


@bench.command("ftl")
def bench_ftl_command(
    workload: Annotated[Workload, typer.Option(help="load on the drive")] = Workload.ATTENTION,
    preset: Annotated[str, typer.Option(help="randread: which conventional SSD")] = "nvmevirt-970pro",
    block_bytes: Annotated[int, typer.Option(help="randread: size of a request")] = 4096,
    qd: Annotated[int, typer.Option(min=1, max=65536, help="randread: requests under way")] = 16,
    read_percent: Annotated[int, typer.Option(min=0, max=100, help="randread: share of reads")] = 100,
    requests: Annotated[int, typer.Option(min=1, help="randread: requests; attention: layers read")] = 1_000_000,
    capacity_gb: Annotated[int, typer.Option(min=1, help="attention: capacity of the drive, 10^9 bytes")] = 64,
    fill: Annotated[float, typer.Option(min=0.01, max=0.9, help="attention: share that is filled first")] = 0.5,
    heads: Annotated[int, typer.Option(min=1, max=128, help="attention: KV heads")] = 40,
    tokens: Annotated[int, typer.Option(min=64, max=1 << 17, help="attention: tokens of a sequence")] = 1536,
    compression: Annotated[int, typer.Option(min=1, max=64, help="attention: SparF at 1/C")] = 8,
    trace: Annotated[Path | None, typer.Option(help="churn: CSV with lengths of requests")] = None,
    full: Annotated[float, typer.Option(min=0.1, max=0.85, help="churn: share of the drive in use")] = 0.8,
    erase_mean: Annotated[float, typer.Option(min=0.1, help="churn: run until blocks are worn this much")] = 50.0,
    seed: Annotated[int, typer.Option(help="of all that is random")] = 0,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Flash under load: modelled times, wear, and how fast the emulator is."""
    from csd_spec.presets import BLOCK_SSDS
    from eval.bench.ftl import bench_attention, bench_churn, bench_randread

    if workload is Workload.RANDREAD:
        if preset not in BLOCK_SSDS:
            raise ValueError(f"preset = {preset!r}: must be one of {', '.join(BLOCK_SSDS)}")
        with err.status("requests"):
            result = bench_randread(BLOCK_SSDS[preset], block_bytes, qd, read_percent, requests, seed)
    elif workload is Workload.ATTENTION:
        with err.status("filling the drive, then reading"):
            count = min(requests, 2000)
            result = bench_attention(capacity_gb * 10**9, fill, heads, tokens, count, compression)
    else:
        with progress("mean erase count", int(erase_mean)) as tick:
            result = bench_churn(trace, full, erase_mean, seed, tick)
    show(f"ftl, {workload}", result, output)


@bench.command("crash")
def bench_crash_command(
    cuts: Annotated[int, typer.Option(min=2, help="cut points at the least")] = 10_000,
    seed: Annotated[int, typer.Option(help="of the trace")] = 0,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Cut the power at every moment of a trace of all verbs, and at random in longer ones; then compare every byte."""
    from eval.bench.crash import bench_crash

    with progress("power cuts", cuts + cuts // 10) as tick:
        result = bench_crash(cuts, seed, tick)
    show("power cuts", result, output)
    if result["lost"] or result["wrong"]:
        sys.exit(1)


@bench.command("faults")
def bench_faults_command(
    kills: Annotated[int, typer.Option(min=1, help="drives to kill")] = 100,
    drives: Annotated[int, typer.Option(min=1, max=4, help="virtual drives, a process each")] = 2,
    tokens: Annotated[int, typer.Option(min=1, max=512, help="length of a decode; as many as it takes")] = 128,
    flush_every: Annotated[int, typer.Option(min=0, help="decode steps between flushes; 0: never")] = 8,
    seed: Annotated[int, typer.Option(help="of the moments")] = 0,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Kill drives (SIGKILL) at random moments of a decode; they come back and the tokens stay the same."""
    from eval.bench.faults import bench_faults

    with progress("kills", kills) as tick:
        result = bench_faults(kills, drives, tokens, flush_every, seed, tick)
    show("faults", result, output)
    if result["lost_tokens"] or result["wrong_tokens"]:
        sys.exit(1)


@bench.command("fuzz")
def bench_fuzz_command(
    inputs: Annotated[int, typer.Option(min=1, help="mutated commands and window images")] = 100_000,
    seed: Annotated[int, typer.Option(help="of the mutations")] = 0,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Put mutated commands and damaged windows on a drive that two tenants share."""
    from eval.bench.fuzz import bench_fuzz

    with progress("inputs, 10,000 each", inputs // 10_000) as tick:
        result = bench_fuzz(inputs, seed, tick)
    show("fuzz", result, output)
    if result["crashes"] or result["hangs"] or result["leaks"] or result["state_changes"]:
        sys.exit(1)


@bench.command("transport")
def bench_transport_command(
    seconds: Annotated[int, typer.Option(min=1, max=60, help="of each random load")] = 5,
    size_mb: Annotated[int, typer.Option(min=16, max=4096, help="part of the namespace that is used, MiB")] = 512,
    trips: Annotated[int, typer.Option(min=10, help="round trips through the window")] = 5000,
    output: OutputOption = Output.NORMAL,
) -> None:
    """A mounted drive under fio, and round trips through a window in shared memory."""
    from eval.bench.transport import bench_transport

    with err.status("fio, then round trips"):
        result = bench_transport(seconds, size_mb, trips)
    show("transport", result, output)
