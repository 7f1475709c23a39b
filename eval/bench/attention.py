"""The attention kernels beside their rivals and the machine's limits, in turns in one process. Wall time only."""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from attention_engine import METHODS, Memory, Queries, Step
from csd_spec import NAMED, Attention
from eval.bench.contest import Contest, Size
from eval.experiment import Outcome, flat
from eval.plot import check_format, new_figure, save_figure
from vcsd.options import LayoutOption
from vcsd.progress import Tick, no_tick, progress
from vcsd.tables import table

ROUNDS = 5
SCRATCH_TOKENS = 1536
SWEEP_TOKENS, SWEEP_GROUPS = (1024, 8192, 32768), (1, 2, 4, 8)


def bench_attention(
    size: Size, method: str, threads: int = 1, seed: int = 0, layout: str | None = None, tick: Tick = no_tick
) -> dict[str, Any]:
    """Medians of five rounds, in each of which every contestant has its turn; the first round does not count.

    gb_per_s: bytes that the method uses over its time; bandwidth_share: of reading K and V in order. limit_ms: reading
    its rows where they lie, and in order what it scores with; limit_share: how much of that is reached. scratch_mib:
    what a step of 64 sequences with 1536 tokens takes beside K and V. max_rel_error: max |out - ref| / max |ref|.
    """
    if method not in METHODS and method not in NAMED:
        raise ValueError(f"method = {method!r}: must be one of {', '.join([*METHODS, *NAMED])}")
    contest = Contest(size, threads, seed)
    if layout is not None:
        contest.layouts[method] = layout
    error, others = contest.error(contest.attend(method), method)
    nbytes = contest.used_bytes()
    runs: dict[str, Callable[[], Any]] = {
        "read": contest.read_all,
        "gather rows": contest.read_rows,
        **{name: partial(contest.attend, name) for name in dict.fromkeys(["dense", "sparf", method])},
        "sdpa": contest.torch_sdpa,
        "gather": contest.torch_gather,
    }
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - began)
            tick(None)
    median = {name: statistics.median(times[1:]) for name, times in taken.items()}
    bandwidth = contest.read_all() / median["read"] / 1e9
    everything = contest.K.nbytes + contest.V.nbytes
    limit = median["read"]
    if contest.row_bytes < everything:
        limit = median["gather rows"] + median["read"] * (nbytes - contest.row_bytes) / everything
    speed = nbytes / median[method] / 1e9
    return {
        "tokens": size.tokens,
        "heads": size.heads,
        "kv_heads": size.streams,
        "head_dim": size.head_dim,
        "method": method,
        "layout": contest.layout(method),
        "threads": threads,
        "kernel_ms": median[method] * 1e3,
        "gb_per_s": speed,
        "read_bandwidth_gb_per_s": bandwidth,
        "bandwidth_share": speed / bandwidth,
        "limit_ms": limit * 1e3,
        "limit_share": limit / median[method],
        "torch_sdpa_f32_ms": median["sdpa"] * 1e3,
        "torch_gather_ms": median["gather"] * 1e3,
        "speedup_vs_sdpa": median["sdpa"] / median[method],
        "speedup_vs_gather": median["gather"] / median[method],
        "speedup_vs_dense": median["dense"] / median[method],
        "scratch_mib": scratch_mib(replace(size, tokens=SCRATCH_TOKENS), method, layout=layout),
        "max_rel_error": error,
        "tokens_chosen_otherwise": others,
    }


def scratch_mib(size: Size, method: str, sequences: int = 64, layout: str | None = None) -> float:
    """Most memory, in MiB, that arrays take at once during a step of many sequences, its inputs and K and V left out.

    All sequences are the same one, so that the pages of one are enough.
    """
    contest, what = Contest(size), Attention.named(method)
    one, times = contest.stored(what.layout if layout is None else layout), (sequences, 1)
    view = replace(
        one,
        seq_lens=np.tile(one.seq_lens, sequences),
        k_slots=np.tile(one.k_slots, times),
        v_slots=np.tile(one.v_slots, times),
        e_slots=np.tile(one.e_slots, (*times, 1)),
        planes={name: np.tile(slots, (*times, 1)) for name, slots in one.planes.items()},
    )
    q, v_mean = np.tile(contest.q, (*times, 1)), np.tile(contest.v_mean, times)
    memory: list[Memory] = [{} for _ in range(sequences)]
    tracemalloc.start()
    METHODS[what.method](Step(view, contest.ftl, Queries.alike(q, contest.params_of(method), v_mean, memory)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 2**20


def sweep(threads: int, tick: Tick = no_tick) -> dict[str, Any]:
    """Dense and SparF over lengths and query groups, against the machine's two limits: memory and arithmetic."""
    points = []
    for tokens in SWEEP_TOKENS:
        for group in SWEEP_GROUPS:
            contest = Contest(Size(tokens, 16 * group, 128, 16), threads)
            for method in ("dense", "sparf"):
                ms = _median_ms(partial(contest.attend, method))
                operations = contest.operations()
                points.append(
                    {
                        "tokens": tokens,
                        "group": group,
                        "method": method,
                        "flop_per_byte": operations / contest.used_bytes(),
                        "gflop_per_s": operations / ms / 1e6,
                    }
                )
                tick(None)
    square = torch.randn(2048, 2048)
    peak = 2 * 2048**3 / _median_ms(lambda: square @ square) / 1e6
    bandwidth = contest.read_all() / _median_ms(contest.read_all) / 1e6
    return {"threads": threads, "read_bandwidth_gb_per_s": bandwidth, "peak_gflop_per_s": peak, "points": points}


def _median_ms(run: Callable[[], Any]) -> float:
    run()
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def roofline(result: dict[str, Any]) -> Any:
    """A figure of the arithmetic rate over operations for each byte."""
    figure, axes = new_figure()
    bandwidth, peak = result["read_bandwidth_gb_per_s"], result["peak_gflop_per_s"]
    intensity = np.geomspace(0.5, 64, 100)
    axes.plot(intensity, np.minimum(intensity * bandwidth, peak), "k-", label="reading in order, FP32 matrix product")
    for method, marker in (("dense", "o"), ("sparf", "^")):
        for tokens in SWEEP_TOKENS:
            points = [p for p in result["points"] if (p["method"], p["tokens"]) == (method, tokens)]
            x, y = [p["flop_per_byte"] for p in points], [p["gflop_per_s"] for p in points]
            axes.plot(x, y, marker, markersize=4, label=f"{method}, {tokens:,} tokens")
    axes.set(xscale="log", yscale="log", xlabel="operations / byte of K and V used", ylabel="GFLOP/s")
    axes.set_title(f"{result['threads']} threads, 16 KV heads of 128, {', '.join(map(str, SWEEP_GROUPS))} queries each")
    axes.legend(fontsize=7)
    return figure


def experiment(
    size: Size,
    method: Annotated[str, typer.Option(help="dense, sparf (r = 16, k = S/8), ours, or another")] = "dense",
    layout: LayoutOption = None,
    threads: Annotated[int, typer.Option(min=1, max=64, help="of the kernel and of its rivals")] = 1,
    all_sizes: Annotated[bool, typer.Option("--sweep", help="dense and SparF over many sizes, as a roofline")] = False,
    plot: Annotated[Path, typer.Option(help="sweep: picture to draw: png, svg or pdf")] = Path("roofline.png"),
) -> Outcome:
    """Wall time of the attention kernels beside PyTorch's, and the share of the memory's bandwidth that they reach."""
    if all_sizes:
        return _swept(threads, plot)
    with progress("turns", (6 if method in ("dense", "sparf") else 7) * (ROUNDS + 1)) as tick:
        return flat("attention", bench_attention(size, method, threads, layout=layout, tick=tick))


def _swept(threads: int, plot: Path) -> Outcome:
    check_format(plot)
    with progress("kernels", 2 * len(SWEEP_TOKENS) * len(SWEEP_GROUPS)) as tick:
        result = sweep(threads, tick)
    save_figure(roofline(result), plot)
    rows = []
    for point in result["points"]:
        roof = min(point["flop_per_byte"] * result["read_bandwidth_gb_per_s"], result["peak_gflop_per_s"])
        share = point["gflop_per_s"] / roof
        rates = f"{point['flop_per_byte']:.2f}", f"{point['gflop_per_s']:.1f}", f"{share:.0%}"
        rows.append((f"{point['tokens']:,}", str(point["group"]), point["method"], *rates))
    columns = ("tokens", "queries", "method", "FLOP/byte", "GFLOP/s", "of the roof")
    shown = table(f"Roofline, {threads} threads: see {plot}", columns, rows, left=("none",))
    return Outcome(result | {"plot": str(plot)}, [shown])
