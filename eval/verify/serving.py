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
from typing import Any

import torch
from transformers import PreTrainedModel

from host_driver.hf.shape import placement
from kv_cache.hardware import CSD, DEVICE, HOST
from kv_cache.limits import TierLimits
from kv_cache.planner.problem import BLOCK_TOKENS
from kv_cache.policies import POLICIES as EVERY
from kv_cache.policies import policy_of
from kv_cache.trace import Trace, generate
from vcsd.config import ServingConfig
from vcsd.loading import CHECKPOINT, PROMPT
from vcsd.loading import load as load_model
from vcsd.progress import Tick
from vcsd.sampling import SamplingParams
from vcsd.server import RequestHandle, Server
from vcsd.serving import default_performance_model, serve

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
    """Requests and resources of the server."""

    requests: int = 64
    policies: tuple[str, ...] = tuple(POLICIES)
    max_batch_size: int = 6
    share: float = 0.25  # size of each tier over the KV cache of the longest requests, one per slot
    longest: int = 384  # tokens of the longest request
    drives: int = 2  # of policies that attend in them
    seed: int = 0


DEFAULT_LOAD = ServingLoad()


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


def bench_serving(count: int, seed: int, tick: Tick, load: ServingLoad = DEFAULT_LOAD) -> dict[str, Any]:
    """Serve generated requests under every policy; each tier holds a quarter of the KV cache.

    Returns:
        wrong: Answers that differ from those of a server with only this request. over_limit: Tiers above their limit.
            left_bytes: Bytes left of finished requests. failed: Requests that ended with an error.
    """
    load = replace(load, requests=count, seed=seed)
    asked = requests(load)
    torch.set_num_threads(1)  # model threads would compete with the copy threads
    modes = sorted({name in WITH_DRIVES for name in load.policies})
    wanted = {drives: alone(asked, drives, tick) for drives in modes}
    rows = [run(load, name, asked, wanted[name in WITH_DRIVES], tick) for name in load.policies]
    return {
        "requests": len(asked),
        "tokens": sum(request.new for request in asked),
        **{key: sum(row[key] for row in rows) for key in ("wrong", "over_limit", "left_bytes", "failed")},
        "longest_wait_iterations": max(row["longest_wait_iterations"] for row in rows),
        "rows": rows,
    }


def requests(load: ServingLoad) -> list[ServingRequest]:
    """Requests of the trace, scaled until the longest fits; they arrive at about the service rate."""
    trace = generate(load.requests, 1.0, *LENGTHS, cv=1.5, seed=load.seed)
    scale = min(1.0, load.longest / max(request.tokens for request in trace.requests))
    text, draw = list(PROMPT.read_bytes()), random.Random(load.seed)
    lengths = [
        (max(1, int(request.input_tokens * scale) - LEAST_NEW), max(LEAST_NEW, int(request.output_tokens * scale)))
        for request in trace.requests
    ]
    steps_each = sum(new for _, new in lengths) / len(lengths) / load.max_batch_size
    scaled = []
    for number, ((prompt, new), at) in enumerate(zip(lengths, _arrivals(trace), strict=True)):
        start = draw.randrange(max(1, len(text) - prompt))
        scaled.append(
            ServingRequest(
                at=int(at * len(lengths) * steps_each),
                prompt=(text[start:] + text * (prompt // len(text) + 1))[:prompt],
                new=new,
                stop=(NEWLINE,) if number % STOPPED == 0 else (),
                sampling=SamplingParams(temperature=0.0 if number % SAMPLED else 0.8, top_p=0.95, seed=number),
                cancelled=number % CANCELLED == CANCELLED - 1,
            )
        )
    return scaled


def _arrivals(trace: Trace) -> list[float]:
    """Arrival times, scaled to 0 to 1."""
    last = max(1e-9, trace.requests[-1].arrival)
    return [request.arrival / last for request in trace.requests]


def alone(asked: Sequence[ServingRequest], drives: bool, tick: Tick) -> list[list[int]]:
    """Answers of a server that serves one request at a time, with its whole KV cache on the device."""
    answers = []
    with _served(ServingConfig(max_batch_size=1, drives=int(drives))) as server:
        for request in asked:
            answers.append(_submit(server, request).result())
            tick(None)
    return answers


def run(
    load: ServingLoad, name: str, asked: Sequence[ServingRequest], wanted: Sequence[list[int]], tick: Tick
) -> dict[str, Any]:
    """Serve the trace under a policy; returns counts of violations, and the cost."""
    with _served(setting(load, name, asked)) as server:
        answers = answered(server, asked, tick)
        kv = server.kv
        used, peak, moved = kv.runner.table.used, dict(kv.runner.table.peak), dict(kv.real.moved)
        limits = {place: spec.limit_bytes for place, spec in kv.runner.machine.tiers.items()}
        left = used.total() + (len(kv.drives.sequences) if kv.drives else 0)
        longest = server.counters.longest_wait
    streams = answers.streams
    return {
        "policy": name,
        "right": sum(_right(*pair) for pair in zip(streams, wanted, strict=True)),
        "wrong": sum(not _right(*pair) for pair in zip(streams, wanted, strict=True)),
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
    longest = sorted(len(request.prompt) + request.new for request in asked)[-load.max_batch_size :]
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
        drives=load.drives if with_drives else 0,
        max_batch_size=load.max_batch_size,
        max_tokens=longest[-1],
        max_queued_requests=len(asked) + 1,
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
        for stream, request in zip(streams, asked, strict=False):
            if request.cancelled and len(stream.tokens) >= AFTER and not stream.finish_reason:
                stream.cancel()
        if not busy and not following:
            break
    for _ in streams:
        tick(None)
    return Answers(streams, iteration, time.perf_counter() - began_s)


def _submit(server: Server, request: ServingRequest) -> RequestHandle:
    return server.submit(request.prompt, request.new, request.stop, request.sampling)


@cache
def _model() -> PreTrainedModel:
    return load_model(CHECKPOINT)[0]


def _served(serving: ServingConfig) -> AbstractContextManager[Server]:
    return serve(_model(), serving, background=False)
