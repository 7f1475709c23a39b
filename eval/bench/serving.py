"""The shipped model serves a trace under every policy, with three checks.

Each answer must match that of the request served alone, no tier may exceed its size, and nothing may remain allocated.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from typing import Annotated, Any

import torch
import typer
from transformers import PreTrainedModel

from csd_link.driveset import DriveSetConfig
from host_driver.hf.shape import placement
from kv_cache.hardware import CSD, DEVICE, DIRECT, HOST
from kv_cache.limits import TierLimits
from kv_cache.planner.problem import BLOCK_TOKENS
from kv_cache.policies import POLICIES as EVERY
from kv_cache.policies import policy_of
from kv_cache.trace import Trace, generate
from vcsd.loading import CHECKPOINT, PROMPT
from vcsd.loading import load as load_model
from vcsd.options import MAX_SEED
from vcsd.progress import Tick, progress
from vcsd.sampling import SamplingParams
from vcsd.server import RequestHandle, RequestRejectedError, Server
from vcsd.serving import ServingConfig, default_performance_model, serve
from vcsd.tables import table
from vcsd_eval.experiment import Outcome
from vcsd_eval.public_trace import OptionalTrace, read_trace

MIB = 1 << 20
POLICIES = {name: make for name, make in EVERY.items() if name != "oracle"}  # the oracle is a bound in simulated time
WITH_DRIVES = [name for name in POLICIES if CSD in policy_of(name).tiers]
LENGTHS = (64, 320), (16, 64)  # tokens of generated prompts and answers
CANCELLED, SAMPLED, STOPPED = 8, 2, 3  # every n-th request
AFTER = 3  # tokens until a request is cancelled
NEWLINE = 10  # the model's tokens are bytes
LEAST_NEW = 4
SLOW_LINK = 4.0  # steps per page-in of all layers of the longest request: forces policies to choose
DRIVES_OVER_LINK = 2.0  # rate of the drives over the rate of this link


@dataclass(frozen=True, slots=True)
class ServingLoad:
    """Trace and resources of the server."""

    trace: OptionalTrace = None
    requests: Annotated[
        int, typer.Option(min=1, max=100_000, help="number of requests, from the start of the trace")
    ] = 64
    policies: Annotated[str, typer.Option(help="all, or comma-separated names")] = "all"
    max_batch_size: Annotated[int, typer.Option(min=1, max=6, help="requests that decode at once")] = 6
    share: Annotated[
        float,
        typer.Option(
            "--tier-fraction",
            min=0.05,
            max=1,
            help="size of each tier as a fraction of the KV cache of the SLOTS longest requests",
        ),
    ] = 0.25
    longest: Annotated[
        int, typer.Option("--max-request-tokens", min=32, max=4096, help="tokens of the longest request after scaling")
    ] = 384
    drives: Annotated[int, typer.Option(min=1, max=4, help="number of drives, for policies that attend in them")] = 2
    chunk: Annotated[int, typer.Option(min=0, max=4096, help="prefill chunk, tokens; 0 disables chunking")] = 0
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="random seed for prompts and generated requests")] = 0

    def names(self) -> list[str]:
        """Names of the policies; raises ValueError for an unknown one."""
        given = dict.fromkeys(name.strip() for name in self.policies.split(",") if name.strip())
        names = list(POLICIES) if self.policies == "all" else list(given)
        if not names:
            raise ValueError(f"policies = {self.policies!r}: must be all, or of {', '.join(POLICIES)}")
        if other := [name for name in names if name not in POLICIES]:
            raise ValueError(f"policies = {other[0]!r}: must be all, or of {', '.join(POLICIES)}")
        return names


@dataclass(frozen=True, slots=True)
class ServingRequest:
    """A request: its arrival in iterations, and whether it is cancelled."""

    at: int
    prompt: list[int]
    new: int
    stop: tuple[int, ...]
    sampling: SamplingParams
    cancelled: bool


@dataclass(slots=True)
class Answers:
    """Output of a server: token streams in the order of the requests, and the number of iterations."""

    streams: list[RequestHandle]
    iterations: int
    wall_s: float


def experiment(load: ServingLoad) -> Outcome:
    """The shipped model serves a trace under every policy; each tier holds a quarter of the KV cache. Checks all
    answers.
    """
    names, asked = load.names(), requests(load)
    torch.set_num_threads(1)  # model threads would compete with the copy threads
    modes = sorted({name in WITH_DRIVES for name in names})
    with progress("requests", len(asked) * (len(modes) + len(names))) as tick:
        wanted = {drives: alone(asked, drives, tick) for drives in modes}
        rows = [run(load, name, asked, wanted[name in WITH_DRIVES], tick) for name in names]
    result = {
        "requests": len(asked),
        "tokens": sum(each.new for each in asked),
        **{key: sum(row[key] for row in rows) for key in ("wrong", "over_limit", "left_bytes", "failed")},
        "longest_wait_iterations": max(row["longest_wait_iterations"] for row in rows),
        "policies": {row["policy"]: row for row in rows},
        "rows": rows,
    }
    bad = any(result[key] for key in ("wrong", "over_limit", "left_bytes", "failed"))
    return Outcome(result, [_table(rows)], failed=bad)


def requests(load: ServingLoad) -> list[ServingRequest]:
    """Requests of the trace, scaled until the longest fits; they arrive at about the service rate."""
    if load.trace is None:
        trace = generate(load.requests, 1.0, *LENGTHS, cv=1.5, seed=load.seed)
    else:
        trace = read_trace(load.trace).head(load.requests)
    scale = min(1.0, load.longest / max(request.tokens for request in trace.requests))
    text, draw = list(PROMPT.read_bytes()), random.Random(load.seed)
    lengths = [
        (max(1, int(request.input_tokens * scale) - LEAST_NEW), max(LEAST_NEW, int(request.output_tokens * scale)))
        for request in trace.requests
    ]
    steps_each = sum(new for _, new in lengths) / len(lengths) / load.max_batch_size
    found = []
    for number, ((given, new), at) in enumerate(zip(lengths, _arrivals(trace), strict=True)):
        start = draw.randrange(max(1, len(text) - given))
        found.append(
            ServingRequest(
                at=int(at * len(lengths) * steps_each),
                prompt=(text[start:] + text * (given // len(text) + 1))[:given],
                new=new,
                stop=(NEWLINE,) if number % STOPPED == 0 else (),
                sampling=SamplingParams(temperature=0.0 if number % SAMPLED else 0.8, top_p=0.95, seed=number),
                cancelled=number % CANCELLED == CANCELLED - 1,
            )
        )
    return found


def _arrivals(trace: Trace) -> list[float]:
    """Arrival times, scaled to 0 to 1."""
    last = max(1e-9, trace.requests[-1].arrival)
    return [request.arrival / last for request in trace.requests]


def alone(asked: Sequence[ServingRequest], drives: bool, tick: Tick) -> list[list[int]]:
    """Answers of a server that serves one request at a time, with its whole KV cache on the device."""
    found = []
    with _served(ServingConfig(max_batch_size=1, drives=DriveSetConfig() if drives else ())) as server:
        for each in asked:
            found.append(_submit(server, each).result())
            tick(None)
    return found


def run(
    load: ServingLoad, name: str, asked: Sequence[ServingRequest], wanted: Sequence[list[int]], tick: Tick
) -> dict[str, Any]:
    """Serve the trace under a policy; returns counts of violations, and the cost."""
    with _served(setting(load, name, asked)) as server:
        answers = answered(server, asked, tick)
        kv = server.kv
        used, peak, moved = kv.runner.table.used, dict(kv.runner.table.peak), dict(kv.real.moved)
        limits = {place: spec.limit_bytes for place, spec in kv.runner.machine.tiers.items()}
        left = used.total() + (len(kv.drives.batches) if kv.drives else 0)
        longest = server.counters.longest_wait
    streams = answers.streams
    return {
        "policy": name,
        "right": sum(_right(*each) for each in zip(streams, wanted, strict=True)),
        "wrong": sum(not _right(*each) for each in zip(streams, wanted, strict=True)),
        "cancelled": sum(stream.finish_reason == "cancelled" for stream in streams),
        "stopped": sum(stream.finish_reason == "stop" for stream in streams),
        "failed": sum(stream.finish_reason == "failed" for stream in streams),
        "over_limit": sum(limit is not None and peak.get(place, 0) > limit for place, limit in limits.items()),
        "left_bytes": left,
        "limit_bytes": {place: limits[place] for place in (DEVICE, HOST)},
        "peak_bytes": peak,
        "moved_bytes": moved,
        "iterations": answers.iterations,
        "longest_wait_iterations": longest,
        "wall_tokens_per_s": sum(len(stream.tokens) for stream in streams) / answers.wall_s,
    }


def _right(stream: RequestHandle, wanted: list[int]) -> bool:
    """Whether the tokens match those of the request served alone, up to the point where it was stopped."""
    whole = stream.finish_reason == "cancelled" or len(stream.tokens) == len(wanted)
    return whole and stream.tokens == wanted[: len(stream.tokens)]


def setting(load: ServingLoad, name: str, asked: Sequence[ServingRequest]) -> ServingConfig:
    """A policy, and tiers that hold a fraction of the KV cache of the longest requests, one per slot; at least one
    request.
    """
    with_drives = name in WITH_DRIVES
    model = _model()
    shape = placement(model).shape
    row_bytes = 2 * shape.kv_heads * shape.head_dim * (2 if with_drives else 4)
    longest = sorted(len(each.prompt) + each.new for each in asked)[-load.max_batch_size :]
    tokens = int(load.share * load.max_batch_size * sum(longest) / len(longest))
    least = (
        -(-(longest[-1] + 1) // BLOCK_TOKENS) * BLOCK_TOKENS
    )  # minimum for one request, plus a layer for its prefill
    size = max(tokens * shape.layers, least * (shape.layers + 1)) * row_bytes
    cost = default_performance_model(shape, row_bytes, load.drives if with_drives else 0, model.num_parameters())
    fetch_token_s = SLOW_LINK * cost.compute.linear_s() / longest[-1]
    rate = DRIVES_OVER_LINK * shape.layers * row_bytes / fetch_token_s
    drives = replace(cost.drives, bytes_per_s=rate, call_s=0.0) if cost.drives else None
    cost = replace(cost, fetch_token_s=fetch_token_s, drives=drives)
    return ServingConfig(
        policy=name,
        tiers=TierLimits(device=size, host=size),
        drives=DriveSetConfig(count=load.drives) if with_drives else (),
        max_batch_size=load.max_batch_size,
        max_tokens=longest[-1],
        max_queued_requests=len(asked) + 1,
        prefill_chunk_tokens=load.chunk,
        cost=cost,
    )


def answered(server: Server, asked: Sequence[ServingRequest], tick: Tick) -> Answers:
    """Serve requests with their arrivals, cancellations and completions."""
    streams, began_s = list[RequestHandle](), time.perf_counter()
    coming = iter(asked)
    following = next(coming, None)
    for iteration in count():
        while following and following.at <= iteration:
            streams.append(_submit(server, following))
            following = next(coming, None)
        busy = server.step()
        for stream, each in zip(streams, asked, strict=False):
            if each.cancelled and len(stream.tokens) >= AFTER and not stream.finish_reason:
                stream.cancel()
        if not busy and not following:
            break
    for _ in streams:
        tick(None)
    return Answers(streams, iteration, time.perf_counter() - began_s)


def _submit(server: Server, asked: ServingRequest) -> RequestHandle:
    try:
        return server.submit(asked.prompt, asked.new, asked.stop, asked.sampling)
    except RequestRejectedError as error:
        raise ValueError(
            f"{error}: increase --tier-fraction or --max-batch-size, or reduce --max-request-tokens"
        ) from error


@cache
def _model() -> PreTrainedModel:
    return load_model(CHECKPOINT)[0]


def _served(serving: ServingConfig) -> AbstractContextManager[Server]:
    return serve(_model(), serving, background=False)


def _table(rows: list[dict[str, Any]]) -> Any:
    columns = (
        "policy",
        "right",
        "wrong",
        "cancelled",
        "device",
        "limit",
        "host",
        "files",
        "drives",
        "moved",
        "wait",
        "/s",
    )

    def row(each: dict[str, Any]) -> tuple[str, ...]:
        held = (f"{each['peak_bytes'].get(place, 0) / MIB:.1f}" for place in (HOST, DIRECT, CSD))
        device, limit = (each[key][DEVICE] / MIB for key in ("peak_bytes", "limit_bytes"))
        moved = sum(each["moved_bytes"].values()) / MIB
        counts = (str(each[key]) for key in ("right", "wrong", "cancelled"))
        tail = (f"{moved:,.0f}", str(each["longest_wait_iterations"]), f"{each['wall_tokens_per_s']:.0f}")
        return (each["policy"], *counts, f"{device:.1f}", f"{limit:.1f}", *held, *tail)

    title = "The shipped model serves: K and V in MiB, the longest wait in iterations, tokens a second of this machine"
    return table(title, columns, [row(each) for each in rows], left=("policy",))
