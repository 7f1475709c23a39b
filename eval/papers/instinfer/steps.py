"""A decode step on the modelled executor: machines and policies of InstInfer's systems."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import product
from math import floor

from kv_cache import (
    CSD,
    DEVICE,
    HOST,
    PAGE_CACHE,
    BlockKey,
    Iteration,
    IterationRunner,
    Machine,
    Program,
    Route,
    SharedLink,
    Tier,
)
from kv_cache.block_table import WEIGHTS
from kv_cache.transfer.simulated import LayerTime, SimulatedTransfers

OF_ALL = "weights"  # the request that a layer's weights are of


@dataclass(frozen=True, slots=True, kw_only=True)
class TierContents:
    """Data at a tier before a step.

    Attributes:
        tokens: Tokens of each request, mean over steps.
        rows: Bytes of one token of K or V of a layer, by request.
        weights: Bytes of a layer's weights; 0 if the GPU keeps them.
    """

    home: str
    tokens: float
    rows: Mapping[Hashable, int]
    weights: int = 0


def step_s(machine: Machine, policy: Program, layers: int, stored: TierContents, work: LayerTime) -> float:
    """Seconds of a steady-state decode step; the mean over both adjacent lengths if the mean length is no integer."""
    transfers = SimulatedTransfers(machine, lambda attention: work)
    run = IterationRunner(machine, range(layers), policy, transfers)
    first = floor(stored.tokens)
    for layer in range(layers):
        for (request, row), part in product(stored.rows.items(), run.parts):
            run.table.add(BlockKey(request, layer, part), row, stored.home, first - 1)
        if stored.weights:
            run.table.add(BlockKey(OF_ALL, layer, WEIGHTS), stored.weights, stored.home, 1)
    for _ in range(2 if stored.tokens == first else 3):
        run.run(dict.fromkeys(stored.rows, 1), stored.rows)
    _, *steps_ns = transfers.iterations_ns
    return sum(steps_ns) / len(steps_ns) / 1e9


def host_memory(bytes_per_s: float) -> Machine:
    """KV data and weights in host memory, over one link per direction."""
    links = [SharedLink("in", bytes_per_s), SharedLink("out", bytes_per_s)]
    routes = {(HOST, DEVICE): Route("in", ("in",)), (DEVICE, HOST): Route("out", ("out",))}
    return Machine.of([Tier(DEVICE, attends=True), Tier(HOST)], links, routes)


def files(cached_bytes_per_s: float, file_bytes_per_s: float, cache_bytes: int) -> Machine:
    """KV data in files: one rate to the GPU for page-cache hits, one for misses."""
    links = [
        SharedLink("cached", cached_bytes_per_s),
        SharedLink("file", file_bytes_per_s),
        SharedLink("out", cached_bytes_per_s),
    ]
    routes = {
        (PAGE_CACHE, DEVICE): Route("in", ("cached",), miss_links=("file",)),
        (DEVICE, PAGE_CACHE): Route("out", ("out",)),
    }
    return Machine.of([Tier(DEVICE, attends=True), Tier(PAGE_CACHE, cache_bytes=cache_bytes)], links, routes)


def drives() -> Machine:
    """Drives that attend: nothing moves."""
    return Machine.of([Tier(CSD, attends=True)], [], {})


def streamed(t: Iteration) -> None:
    """ZeRO-Inference: a layer's weights are loaded with its KV data, and nothing overlaps."""
    for layer in t.layers:
        weights = BlockKey(OF_ALL, layer, WEIGHTS)
        t.wait(*[t.copy(block, DEVICE) for block in (weights, *t.blocks(layer))])
        t.attend(layer)
        t.drop(weights, DEVICE)
        for block in t.blocks(layer):
            t.move(block, HOST)


def in_turns(t: Iteration) -> None:
    """Drives attend for one part of the batch while the GPU computes for the next."""
    for layer in t.layers:
        for request in t.batch:
            t.attend(layer, [request], at=CSD)
