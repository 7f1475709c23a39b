"""Behaviour of the FTL's flash under three workloads, and the speed of the emulation."""

from __future__ import annotations

import heapq
import resource
import time
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from attention_engine import METHODS, Arithmetic, Compute, DecodeStep, EngineClock, Queries, Read
from csd_firmware.latency import LatencyBreakdown
from csd_firmware.schedule import SCHEDULES, StepResources
from csd_spec import LAYOUTS, DriveSpec, Geometry, KvSlotView
from csd_spec.arrays import I32, I64
from csd_spec.presets import BLOCK_SSDS, INSTCSD_ZYNQ7045_8CH
from ftl import Ftl, Nand, OutOfSpaceError
from vcsd.options import MAX_SEED
from vcsd.progress import Tick, no_tick, progress, status
from vcsd_eval.baselines.conventional import ConventionalSsd
from vcsd_eval.experiment import Outcome, flat
from vcsd_eval.public_trace import TRACE_HELP, read_trace

Picks = tuple[I32, I32]  # tokens (heads, k) and channels (heads, r), ascending


class FtlWorkload(StrEnum):
    """Workload on a drive."""

    RANDREAD = "randread"
    ATTENTION = "attention"
    CHURN = "churn"


@dataclass(frozen=True, slots=True)
class Requests:
    """Load `randread`: a closed loop on a conventional SSD."""

    preset: Annotated[str, typer.Option(help="randread: preset of the conventional SSD")] = "nvmevirt-970pro"
    block_bytes: Annotated[int, typer.Option(min=512, max=1 << 24, help="randread: request size, bytes")] = 4096
    qd: Annotated[int, typer.Option("--iodepth", min=1, max=65536, help="randread: requests in flight")] = 16
    read_percent: Annotated[int, typer.Option(min=0, max=100, help="randread: reads, percent")] = 100
    requests: Annotated[
        int, typer.Option(min=1, max=10**9, help="number of requests (randread) or of layers read (attention)")
    ] = 1_000_000

    def __post_init__(self) -> None:
        if self.preset not in BLOCK_SSDS:
            raise ValueError(f"preset = {self.preset!r}: must be one of {', '.join(BLOCK_SSDS)}")


class Schedule(StrEnum):
    """Order of page reads relative to the engine's work."""

    SERIAL = "serial"
    OVERLAPPED = "overlapped"


@dataclass(frozen=True, slots=True)
class Reads:
    """Load `attention`: page reads of heads, on a drive that prefilled sequences occupy to a given fraction."""

    capacity_gb: Annotated[int, typer.Option(min=1, max=4096, help="attention: capacity of the drive, 10^9 bytes")] = 64
    fill: Annotated[
        float,
        typer.Option(
            "--prefill-fraction", min=0.01, max=0.9, help="attention: fraction of the capacity that is filled first"
        ),
    ] = 0.5
    heads: Annotated[int, typer.Option(min=1, max=128, help="attention: KV heads")] = 40
    tokens: Annotated[int, typer.Option(min=64, max=1 << 17, help="attention: tokens per sequence")] = 1536
    compression: Annotated[int, typer.Option(min=1, max=64, help="attention: compression C of SparF at 1/C")] = 8
    schedule: Annotated[
        Schedule | None, typer.Option(help="attention: order of reads and engine work (default: flash only)")
    ] = None


@dataclass(frozen=True, slots=True)
class Churn:
    """Load `churn`: requests arrive, decode and finish."""

    trace: Annotated[Path | None, typer.Option(help=f"churn: {TRACE_HELP}; only its lengths are used")] = None
    full: Annotated[
        float, typer.Option("--utilization", min=0.1, max=0.85, help="churn: fraction of the drive in use")
    ] = 0.8
    erase_mean: Annotated[
        float,
        typer.Option("--target-pe-cycles", min=0.1, max=100_000, help="churn: mean P/E cycles at which the run ends"),
    ] = 50.0


def peak_rss_bytes() -> int:
    """Peak resident memory of this process, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def latency_keys(latencies: I64, end_ns: int, wall_s: float) -> dict[str, float]:
    """Figures common to all request workloads. Latency and IOPS are simulated; wall time is the emulator's."""
    return {
        "iops": latencies.size / (end_ns / 1e9),
        "mean_latency_us": float(latencies.mean()) / 1e3,
        "p99_latency_us": float(np.percentile(latencies, 99)) / 1e3,
        "simulated_s": end_ns / 1e9,
        "wall_s": wall_s,
        "requests_per_wall_s": latencies.size / wall_s,
    }


def bench_randread(load: Requests, seed: int = 0) -> dict[str, Any]:
    """Closed loop of random requests, aligned to their size, on a drive that was filled sequentially."""
    spec, depth, block_bytes, read_percent = BLOCK_SSDS[load.preset], load.qd, load.block_bytes, load.read_percent
    ConventionalSsd(spec).closed_loop(depth, 64, block_bytes, read_percent)  # compiles
    drive = ConventionalSsd(spec)
    began = time.perf_counter()
    end_ns, latencies = drive.closed_loop(depth, load.requests, block_bytes, read_percent, seed)
    wall_s = time.perf_counter() - began
    host, moved = drive.units_written
    setting = {"preset": spec.name, "block_bytes": block_bytes, "qd": depth, "read_percent": read_percent}
    return setting | latency_keys(latencies, end_ns, wall_s) | {"waf": (host + moved) / host if host else 1.0}


def with_capacity(spec: DriveSpec, capacity_bytes: int) -> DriveSpec:
    """Same drive with the number of blocks per plane that gives at least this capacity."""
    g = spec.geometry
    blocks = max(4, -(-capacity_bytes // (g.superblock_pages * g.page_bytes)))
    return replace(spec, geometry=replace(g, blocks_per_plane=blocks))


def bench_attention(load: Reads, requests: int) -> dict[str, Any]:
    """Page lists of heads on a drive that prefilled sequences occupy to a given fraction, with channel contention.

    Each request is one sequence's layer as SparF at 1 / C reads it: embedding pages of the selected channels, then the
    K and V pages of random tokens. pages_per_wall_s covers locating the pages and simulating their time, and the
    engine's work if a schedule is given. balance is the busiest channel over the mean for one head's K, V and embedding
    pages.
    """
    spec = with_capacity(INSTCSD_ZYNQ7045_8CH, load.capacity_gb * 10**9)
    heads, tokens = load.heads, load.tokens
    ftl = Ftl(spec, Nand(spec.geometry, payload=False))
    layout = LAYOUTS["fp16"].form(spec.geometry.page_bytes, 128, tokens)
    layers, used = 40, 0
    handles: list[int] = []
    while used < load.fill * spec.geometry.pages:
        (handle,) = ftl.create(1, layers, heads, layout)
        for layer in range(layers):
            used += ftl.append([handle], layer, np.array([tokens]), None, None, 0)[0]
        handles.append(handle)
    picks, request = _selections(load), _Request(ftl, load)
    now, pages, wall_s = ftl.timing.idle_ns(), 0, 0.0
    began_ns, latencies = now, np.empty(requests, np.int64)
    for number in range(-2, requests):  # the first two compile
        handle, layer = handles[number % len(handles)], number % layers
        began, start, before = time.perf_counter(), now, ftl.counters.read
        now = request(ftl.view([handle], layer), picks[number % len(picks)], now)
        if number >= 0:
            wall_s += time.perf_counter() - began
            pages += ftl.counters.read - before
            latencies[number] = now - start
        else:
            began_ns = now
    setting = {"preset": spec.name, "capacity_bytes": spec.geometry.capacity_bytes, "pages": pages}
    rate = pages * spec.geometry.page_bytes / ((now - began_ns) / 1e9)
    limit = spec.geometry.channels * spec.timing.channel_bytes_per_s
    return (
        setting
        | latency_keys(latencies, now - began_ns, wall_s)
        | {
            "pages_per_wall_s": pages / wall_s,
            "bandwidth_share": rate / limit,
            "map_bytes_per_page": map_bytes(ftl) / used,
            "mapped_pages": used,
            "balance": worst_balance(ftl, handles[:4]),
            "peak_rss_bytes": peak_rss_bytes(),
        }
    )


class _Request:
    """One sequence's layer as SparF reads it, without data."""

    def __init__(self, ftl: Ftl, load: Reads) -> None:
        self.ftl, self.load, self.units = ftl, load, StepResources(ftl, EngineClock(ftl.spec.engine))
        self.counts = np.full(load.heads, load.tokens // load.compression, np.int64)

    def __call__(self, view: KvSlotView, picks: Picks, now: int) -> int:
        """Simulated time at which the request is complete, ns."""
        if self.load.schedule:
            watch = LatencyBreakdown(now)
            SCHEDULES[self.load.schedule](self._work(view, picks), self.units, watch)
            return watch.now_ns
        selected, channels = picks
        now = self.ftl.read(self.ftl.embedding_pages(view, channels), now)
        for slots in (view.k_slots, view.v_slots):
            now = self.ftl.read(self.ftl.token_pages(view, slots, selected, self.counts), now)
        return now

    def _work(self, view: KvSlotView, picks: Picks) -> list[Read | Compute]:
        """Flash reads and engine operations of SparF."""
        q = np.broadcast_to(np.zeros(1, np.float32), (self.load.heads, 1, 128))
        queries = Queries(q, picks[1].shape[1], self.counts, self.counts // 4, q[:, 0], [{}])
        step = DecodeStep(view, self.ftl, queries, arithmetic=_Picked(*picks))
        METHODS["sparf"](step)
        return step.work


class _Picked(Arithmetic):
    """Known selections without data."""

    def __init__(self, tokens: I32, channels: I32) -> None:
        self.tokens, self.channels = tokens, channels

    def top_channels(self, *arguments: Any) -> I32:
        return self.channels

    def best_tokens(self, *arguments: Any) -> I32:
        return self.tokens

    def approximate(self, *arguments: Any) -> Any:
        return None

    softmax_scores = selected_mass = approximate  # type: ignore[assignment]

    def attend(self, *arguments: Any) -> Any:
        return None, np.float32(0)


def _selections(load: Reads, count: int = 8) -> list[Picks]:
    """Random tokens (heads, k) and channels (heads, r), ascending."""
    generator, heads = np.random.default_rng(0), load.heads
    k, r = load.tokens // load.compression, max(1, 128 // load.compression)
    return [
        (
            np.sort(np.argsort(generator.random((heads, load.tokens)), axis=1)[:, :k], axis=1).astype(np.int32),
            np.sort(np.argsort(generator.random((heads, 128)), axis=1)[:, :r], axis=1).astype(np.int32),
        )
        for _ in range(count)
    ]


def map_bytes(ftl: Ftl) -> int:
    """Memory of the mapping: slots of every group, and the per-block counts of valid pages."""
    slots = sum(mapped.slots.nbytes for seq in ftl.sequences.values() for mapped in seq.maps.values())
    return slots + ftl.placement.valid.nbytes + ftl.placement.claimed.nbytes


def worst_balance(ftl: Ftl, handles: list[int]) -> float:
    """Busiest channel over the mean, maximum over the K and V maps of every head with at least 64 groups."""
    channels, worst = ftl.spec.geometry.channels, 1.0
    for handle in handles:
        seq = ftl.sequences[handle]
        for mapped in seq.primary.values():
            groups = int(seq.lengths.max()) // mapped.per_group // channels * channels
            if groups >= 64:
                of_channel = mapped.slots[:, :, :groups].astype(np.int64) % ftl.spec.geometry.lanes % channels
                for channel in range(channels):
                    worst = max(worst, float((of_channel == channel).sum(2).max()) * channels / groups)
    return worst


def lengths(path: Path | None, seed: int) -> list[tuple[int, int]]:
    """(prompt, output) tokens of the requests of a trace.

    Without a path: log-normal lengths like those of a chat service, median 1000 and 130, at most 8192 and 1024.
    """
    if path is None:
        generator = np.random.default_rng(seed)
        prompts = np.clip(generator.lognormal(np.log(1000), 0.8, 4000), 16, 8192).astype(int)
        outputs = np.clip(generator.lognormal(np.log(130), 0.9, 4000), 1, 1024).astype(int)
        return list(zip(prompts.tolist(), outputs.tolist(), strict=True))
    requests = read_trace(path, arrivals=False).requests
    return [(request.input_tokens, request.output_tokens) for request in requests]


CHURN_DRIVE = replace(
    INSTCSD_ZYNQ7045_8CH,
    name="churn",
    geometry=Geometry(
        channels=8, dies_per_channel=2, planes_per_die=2, blocks_per_plane=1024, pages_per_block=16, page_bytes=4096
    ),
)
CHURN_MODEL = {"layers": 4, "heads": 4}  # small, like the drive: it holds a hundred requests
STEP = 16  # tokens per request between two checks for finished requests


def bench_churn(load: Churn, seed: int = 0, tick: Tick = no_tick) -> dict[str, Any]:
    """Requests arrive, decode concurrently and finish at `full` of the capacity, until the mean erase count is
    `erase_mean`.

    waf: pages programmed over full pages of K, V and embedding-indexed K.
    """
    ftl = Ftl(CHURN_DRIVE, Nand(CHURN_DRIVE.geometry, payload=False))
    requests, layers, heads = lengths(load.trace, seed), CHURN_MODEL["layers"], CHURN_MODEL["heads"]
    layout = LAYOUTS["fp16"].form(CHURN_DRIVE.geometry.page_bytes, 128, 2048)
    pages, counts = CHURN_DRIVE.geometry.pages, ftl.nand.erase_count
    live: list[tuple[int, int]] = []  # (round in which the request finishes, handle)
    number = rounds = refused = 0
    began, last, fullness = time.perf_counter(), 0.0, 0.0
    while counts.mean() < load.erase_mean:
        while int(ftl.placement.valid.sum()) < load.full * pages:
            prompt, output = requests[number % len(requests)]
            number += 1
            (handle,) = ftl.create(1, layers, heads, layout)
            try:
                for layer in range(layers):
                    ftl.append([handle], layer, np.array([prompt]), None, None, 0)
            except OutOfSpaceError:
                ftl.free([handle], 0)
                refused += 1
                break
            heapq.heappush(live, (rounds + -(-output // STEP), handle))
        fullness += int(ftl.placement.valid.sum()) / pages
        for _, handle in live:
            for layer in range(layers):
                ftl.append([handle], layer, np.array([STEP]), None, None, 0)
        rounds += 1
        while live and live[0][0] <= rounds:
            ftl.free([heapq.heappop(live)[1]], 0)
        if counts.mean() - last >= 1:
            last = counts.mean()
            tick(None)
    wall_s = time.perf_counter() - began
    c = ftl.counters
    return {
        "requests": number,
        "refused": refused,
        "full": fullness / rounds,
        "waf": c.waf,
        "pages_moved": c.moved,
        "pages_journal": c.journal,
        "pages_groups": c.groups,
        "erase_max": int(counts.max()),
        "erase_min": int(counts.min()),
        "erase_mean": float(counts.mean()),
        "erase_spread": float((counts.max() - counts.min()) / counts.mean()),
        "balance": worst_balance(ftl, [handle for _, handle in live]),
        "wall_s": wall_s,
        "pages_per_wall_s": (c.groups + c.moved + c.journal) / wall_s,
        "peak_rss_bytes": peak_rss_bytes(),
    }


def experiment(
    requests: Requests,
    reads: Reads,
    churn: Churn,
    workload: Annotated[FtlWorkload, typer.Option(help="load on the drive")] = FtlWorkload.ATTENTION,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="random seed")] = 0,
) -> Outcome:
    """Flash under load: simulated times, wear, and the speed of the emulator."""
    if workload is FtlWorkload.RANDREAD:
        with status("requests"):
            result = bench_randread(requests, seed)
    elif workload is FtlWorkload.ATTENTION:
        with status("filling the drive, then reading"):
            result = bench_attention(reads, min(requests.requests, 2000))
    else:
        with progress("mean erase count", int(churn.erase_mean)) as tick:
            result = bench_churn(churn, seed, tick)
    return flat(f"ftl, {workload}", result)
