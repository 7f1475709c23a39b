"""Benchmarks of the attention kernels: PyTorch baselines and hardware limits, interleaved in one process."""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import llvmlite.binding as llvm
import numpy as np
import torch
import typer

from attention_engine import METHODS, DecodeStep, Memory, Queries
from attention_engine._dot4 import WAY
from csd_spec import NAMED, AttentionConfig
from vcsd.progress import Tick, no_tick, progress
from vcsd.tables import table
from vcsd_eval.bench.kernel_cases import Contest, Size
from vcsd_eval.experiment import Outcome, flat
from vcsd_eval.plot import check_format, new_figure, save_figure

ROUNDS = 9
SCRATCH_TOKENS = 1536
SWEEP_TOKENS, SWEEP_GROUPS = (1024, 8192, 32768), (1, 2, 4, 8)


def bench_attention(
    size: Size, method: str, threads: int = 1, seed: int = 0, layout: str | None = None, tick: Tick = no_tick
) -> dict[str, Any]:
    """Medians over rounds in which every implementation runs once; the first round is a warm-up.

    Times are CPU times of the calling thread (`clock` is "thread"), so that other work on the machine has little
    effect; with several threads they are wall-clock times (`clock` is "wall").

    Columns:
        cpu: CPU features that the kernels use.
        gb_per_s: Bytes that the method uses, divided by its time.
        bandwidth_share: gb_per_s over the rate of a sequential read of the KV data.
        limit_ms: Time to gather the method's rows from their locations and to read all its other bytes sequentially.
        limit_share: limit_ms over the method's time.
        speedup_vs_dense: Time of dense attention over the method's, median of the rounds' ratios.
        dense_bandwidth_share: Fraction of the read bandwidth that dense attention reaches.
        scratch_mib: Memory that a step of 64 sequences with 1536 tokens needs in addition to the KV data.
        max_rel_error: max |out - ref| / max |ref|.
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
    taken = _times(runs, time.thread_time if threads == 1 else time.perf_counter, tick)
    median = {name: statistics.median(times) for name, times in taken.items()}
    ratios = [dense / own for dense, own in zip(taken["dense"], taken[method], strict=True)]
    return {
        "tokens": size.tokens,
        "heads": size.heads,
        "kv_heads": size.streams,
        "head_dim": size.head_dim,
        "method": method,
        "layout": contest.layout(method),
        "threads": threads,
        "clock": "thread" if threads == 1 else "wall",
        "cpu": capability(),
        "kernel_ms": median[method] * 1e3,
        **_shares(contest, nbytes, median, method),
        "torch_sdpa_f32_ms": median["sdpa"] * 1e3,
        "torch_gather_ms": median["gather"] * 1e3,
        "speedup_vs_sdpa": median["sdpa"] / median[method],
        "speedup_vs_gather": median["gather"] / median[method],
        "speedup_vs_dense": statistics.median(ratios),
        "speedup_vs_dense_worst": min(ratios),
        "scratch_mib": scratch_mib(replace(size, tokens=SCRATCH_TOKENS), method, layout=layout),
        "max_rel_error": error,
        "tokens_not_in_reference": others,
    }


def _shares(contest: Contest, nbytes: int, median: dict[str, float], method: str) -> dict[str, float]:
    """Fractions of the machine's bandwidth, and of the limit it sets, that the method and dense attention reach."""
    bandwidth, everything = contest.read_all() / median["read"] / 1e9, contest.K.nbytes + contest.V.nbytes
    limit = median["read"] * nbytes / everything
    if contest.row_bytes:
        limit = median["gather rows"] + median["read"] * (nbytes - contest.row_bytes) / everything
    speed = nbytes / median[method] / 1e9
    return {
        "gb_per_s": speed,
        "read_bandwidth_gb_per_s": bandwidth,
        "bandwidth_share": speed / bandwidth,
        "limit_ms": limit * 1e3,
        "limit_share": limit / median[method],
        "dense_bandwidth_share": everything / median["dense"] / 1e9 / bandwidth,
    }


def _times(runs: dict[str, Callable[[], Any]], clock: Callable[[], float], tick: Tick) -> dict[str, list[float]]:
    """Seconds of each implementation in each round; the first round is a warm-up and is dropped."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS + 1):
        for name, run in runs.items():
            began = clock()
            run()
            taken[name].append(clock() - began)
            tick(None)
    return {name: times[1:] for name, times in taken.items()}


def capability() -> str:
    """CPU features that decide the speed of the kernels: vector width, int8 dot products, AMX."""
    has = llvm.get_host_cpu_features()
    vectors = next((name for name in ("avx512f", "avx2") if has.get(name)), "none")
    return ", ".join([vectors, f"int8 by {WAY}", *(name for name in ("amx-int8", "amx-bf16") if has.get(name))])


def scratch_mib(size: Size, method: str, sequences: int = 64, layout: str | None = None) -> float:
    """Peak memory of temporary arrays in a step of many sequences, MiB; inputs and KV data are not counted.

    All sequences are the same one, so the pages of one sequence are enough.
    """
    contest, what = Contest(size), AttentionConfig.named(method)
    one, times = contest.stored(what.layout if layout is None else layout), (sequences, 1)
    view = replace(
        one,
        seq_lens=np.tile(one.seq_lens, sequences),
        k_slots=np.tile(one.k_slots, times),
        v_slots=np.tile(one.v_slots, times),
        e_slots=np.tile(one.e_slots, (*times, 1)),
        maps={name: np.tile(slots, (*times, 1)) for name, slots in one.maps.items()},
    )
    q, v_mean = np.tile(contest.q, (*times, 1)), np.tile(contest.v_mean, times)
    memory: list[Memory] = [{} for _ in range(sequences)]
    tracemalloc.start()
    METHODS[what.method](DecodeStep(view, contest.ftl, Queries.uniform(q, contest.params_of(method), v_mean, memory)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 2**20


def sweep(threads: int, tick: Tick = no_tick) -> dict[str, Any]:
    """Dense and SparF over lengths and query groups, compared with the two hardware limits: memory and arithmetic."""
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
    """Figure of the arithmetic rate over the arithmetic intensity (operations per byte)."""
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
    layout: Annotated[str | None, typer.Option(help="KV layout (default: the method's, or fp16)")] = None,
    threads: Annotated[int, typer.Option(min=1, max=64, help="threads of the kernel and of the baselines")] = 1,
    all_sizes: Annotated[bool, typer.Option("--sweep", help="dense and SparF over many sizes, as a roofline")] = False,
    plot: Annotated[Path, typer.Option(help="sweep: picture to draw: png, svg or pdf")] = Path("roofline.png"),
) -> Outcome:
    """Time of the attention kernels compared with PyTorch's, and the fraction of memory bandwidth that they reach."""
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
