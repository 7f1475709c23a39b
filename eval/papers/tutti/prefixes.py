"""Requests that share prefixes, over stores and loading paths: hits, TTFT, rates, prices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from csd_spec.presets import INSTCSD_OVERLAPPED
from kv_cache.trace import Request, Trace
from vcsd.options import OptionError
from vcsd.tables import table
from vcsd_eval.experiment import Outcome
from vcsd_eval.options import numbers
from vcsd_eval.papers import options
from vcsd_eval.papers.machines import overlay
from vcsd_eval.papers.profiles import Gpu, Model
from vcsd_eval.papers.tutti.constants import SSD_TB
from vcsd_eval.papers.tutti.evaluate import (
    DRAM,
    DRAM_GB,
    DRAM_GB_HOUR,
    DRIVES,
    GB,
    GDS,
    H100_HOUR,
    SSD,
    SSD_GB_HOUR,
    TUTTI,
)
from vcsd_eval.papers.tutti.in_drives import Drives
from vcsd_eval.papers.tutti.reading import GpuReading
from vcsd_eval.papers.tutti.reading import Path as Way
from vcsd_eval.papers.tutti.reuse import PrefixQuestion, reuse
from vcsd_eval.papers.tutti.store import BlockStore
from vcsd_eval.public_trace import TRACE_HELP, read_trace

Array = NDArray[np.float64]
USED = 0.9  # assumed: fraction of GPU memory for weights and KV cache
SLO_S = 1.0  # mean time to first token
HALVED = 40  # of an interval of rates


@dataclass(frozen=True, slots=True)
class PrefixSystem:
    """A prefix store in addition to GPU memory. in_drives: part of a prefix may be attended to in its drives."""

    store_gb: float = 0
    way: Way | None = None
    dram_gb: float = 0
    in_drives: bool = False

    @property
    def dollars_per_hour(self) -> float:
        """By Tutti's prices; a drive that attends is taken to cost what an SSD does."""
        ssd_gb = 0 if self.way is DRAM else self.store_gb
        return H100_HOUR + self.dram_gb * DRAM_GB_HOUR + ssd_gb * SSD_GB_HOUR


_SSD_GB = 1000 * SSD_TB.value
SYSTEMS = {
    "HBM": PrefixSystem(),
    "LMCache-DRAM": PrefixSystem(DRAM_GB, DRAM, DRAM_GB),
    "LMCache-SSD": PrefixSystem(_SSD_GB, SSD, DRAM_GB),
    "LMCache-GDS": PrefixSystem(_SSD_GB, GDS, DRAM_GB),
    "Tutti": PrefixSystem(_SSD_GB, TUTTI),
    "ours": PrefixSystem(_SSD_GB, TUTTI, in_drives=True),
}


@dataclass(frozen=True, slots=True)
class Hits:
    """Tokens of each prompt that are stored, and those of them in GPU memory. written: blocks written to the store."""

    stored: Sequence[int]
    on_gpu: Sequence[int]
    blocks: int
    written: int


def find_hits(trace: Trace, gpu_blocks: int, store_blocks: int | None) -> Hits:
    """Look every prompt up when its turn comes, and keep it in both; its last token is never taken from a store."""
    gpu, store = BlockStore(gpu_blocks), BlockStore(store_blocks)
    stored, on_gpu, blocks = list[int](), list[int](), 0
    for request in trace.requests:
        near = gpu.leading(request.hashes)
        far = max(near, store.leading(request.hashes))
        blocks += far
        for lengths, leading in ((stored, far), (on_gpu, near)):
            lengths.append(min(leading * trace.block_tokens, request.input_tokens - 1))
        gpu.put(request.hashes)
        store.put(request.hashes)
    return Hits(stored, on_gpu, blocks, store.written)


def service_s(requests: Sequence[Request], hits: Hits, system: PrefixSystem, reading: GpuReading) -> Array:
    """Service time of each request: its new tokens, and the transfers for them, seconds."""
    drives = Drives(INSTCSD_OVERLAPPED, min(DRIVES, reading.model.kv_heads), reading.model.shape)

    def one(request: Request, stored: int, on_gpu: int) -> float:
        new, away = request.input_tokens - stored, stored - on_gpu
        loaded = reading.first_token_s(new, stored, system.way, here=on_gpu)
        if system.way is None or not (system.in_drives and away):
            return loaded
        near = reading.compute_s(new, stored) - reading.compute_s(new, away)
        return min(loaded, drives.split_s(reading, new, away, system.way)[1] + near)

    return np.array([one(*request_hits) for request_hits in zip(requests, hits.stored, hits.on_gpu, strict=True)])


def ttft_s(arrivals: Array, service: Array) -> Array:
    """TTFT of requests at one server, first come, first served, seconds."""
    before = np.cumsum(service) - service
    return np.maximum.accumulate(arrivals - before) + before - arrivals + service


def spread(arrivals: Array) -> Array:
    """Requests of one time evenly over the time until the next ones: traces round to seconds in which many come."""
    times, where, counts = np.unique(arrivals, return_inverse=True, return_counts=True)
    gaps = np.append(np.diff(times), 0.0)
    behind = np.arange(len(arrivals)) - (np.cumsum(counts) - counts)[where]
    return times[where] + gaps[where] * behind / counts[where]


def most_speed(arrivals: Array, service: Array, within: Callable[[Array], bool]) -> float:
    """Largest factor by which the trace may be accelerated."""
    low, high = 0.0, 1.0
    while within(ttft_s(arrivals / high, service)) and high < 1024:
        low, high = high, 2 * high
    for _ in range(HALVED):
        middle = (low + high) / 2
        low, high = (middle, high) if within(ttft_s(arrivals / middle, service)) else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class ServedTrace:
    """Requests that share prefixes, with --trace."""

    trace: Annotated[Path | None, typer.Option(help=f"{TRACE_HELP}; with hashes of blocks, as Mooncake's has")] = None
    count: Annotated[
        int,
        typer.Option("--requests", min=0, max=1 << 20, help="number of requests, from the start of the trace; 0: all"),
    ] = 0
    stores: Annotated[str, typer.Option(help="comma-separated store sizes for the hit counts, GB")] = "100,256,1000"
    speed: Annotated[
        float, typer.Option(min=1e-4, max=100, help="speed-up factor of arrivals at which TTFT is shown")
    ] = 0.25


def experiment(machine: options.MachineOptions, question: PrefixQuestion, served: ServedTrace) -> Outcome:
    """A question after a stored prefix, loaded or attended to in drives; with --trace, whole stores of prefixes.

    With a trace: hits by size of the store; TTFT, rates and prices of Tutti, its baselines and drives.
    """
    model, gpu, _ = machine.profiles("llama-3-8b", "h100", "pcie5")
    if served.trace:
        return _serve(served.trace, served, model, gpu)
    return reuse(model, gpu, question)


def _serve(trace: Path, load: ServedTrace, model: Model, gpu: Gpu) -> Outcome:
    served = read_trace(trace).head(load.count)
    if not served.block_tokens:
        raise OptionError(f"--trace {trace}: has no block hashes (hash_ids): use Mooncake's JSON lines")
    if served.unit != "s":
        raise OptionError(f"--trace {trace}: arrivals must be in seconds, not in engine steps")
    block = served.block_tokens * model.shape.kv_bytes_per_token
    blocks = sum(len(request.hashes) for request in served.requests)
    by_size = [
        {"store_gb": size, "hit_percent": 100 * find_hits(served, 0, _blocks(size, block)).blocks / blocks}
        for size in (*numbers("stores", load.stores, float), None)
    ]
    reading = GpuReading.on(model, gpu, overlay("tutti"))
    rows = [_row(name, served, reading, _room(model, gpu) // block, load.speed) for name in SYSTEMS]
    return Outcome(
        {"requests": len(served.requests), "stores": by_size, "systems": rows}, _shown(by_size, rows, load.speed)
    )


def _room(model: Model, gpu: Gpu) -> int:
    """KV cache that the GPU holds, bytes."""
    room = int(USED * gpu.memory_gib * 2**30 - model.weight_bytes)
    if room <= 0:
        raise ValueError(
            f"gpu = {gpu.name}: {gpu.memory_gib:g} GiB are filled by the weights of {model.name}: choose a larger --gpu"
        )
    return room


def _blocks(size_gb: float | None, block: int) -> int | None:
    return None if size_gb is None else int(size_gb * GB / block)


def _row(name: str, trace: Trace, reading: GpuReading, gpu_blocks: int, speed: float) -> dict[str, Any]:
    """Result of one system for a trace."""
    system, requests = SYSTEMS[name], trace.requests
    block = trace.block_tokens * reading.model.shape.kv_bytes_per_token
    hits = find_hits(trace, gpu_blocks, _blocks(system.store_gb, block))
    service = service_s(requests, hits, system, reading)
    arrivals = spread(np.array([request.arrival for request in requests]))
    first = ttft_s(arrivals / speed, service)
    most = most_speed(arrivals, service, lambda ttft: bool(ttft.mean() < SLO_S))
    per_s = most * len(requests) / max(arrivals[-1], 1e-9)
    tokens = float(np.mean([request.input_tokens for request in requests]))
    return {
        "system": name,
        "hit_percent": 100 * hits.blocks / sum(len(request.hashes) for request in requests),
        "service_s": float(service.mean()),
        **{f"ttft_p{part}_s": float(np.percentile(first, part)) for part in (50, 90, 99)},
        "ttft_mean_s": float(first.mean()),
        "rate_per_s": per_s,
        "dollars_per_hour": system.dollars_per_hour,
        "dollars_per_million_tokens": system.dollars_per_hour / (3600e-6 * per_s * tokens) if per_s else None,
        "written_gb": hits.written * block / GB,
    }


_COLUMNS = {
    "system": "system",
    "hit_percent": "hits, %",
    "service_s": "prefill, s",
    "ttft_p50_s": "TTFT p50, s",
    "ttft_p90_s": "p90",
    "ttft_p99_s": "p99",
    "rate_per_s": "rate with a mean under 1 s, 1/s",
    "dollars_per_hour": "$/h",
    "dollars_per_million_tokens": "$ a million tokens",
}


def _shown(by_size: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], speed: float) -> list[Any]:
    sizes = [
        ("any" if store["store_gb"] is None else f"{store['store_gb']:g}", f"{store['hit_percent']:.1f}")
        for store in by_size
    ]
    cells = [[row[name] if name == "system" else options.cell(row[name]) for name in _COLUMNS] for row in rows]
    return [
        table("Hits of stores", ("GB", "hits, %"), sizes),
        table(f"Systems (modelled), arrivals at {speed:g} of the trace's speed", list(_COLUMNS.values()), cells),
    ]
