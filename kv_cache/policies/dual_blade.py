"""Dual-Blade: the first layers in files behind the page cache, as many as fit it, the others past the kernel.

arXiv 2604.26557. What goes round and does not fit a cache of what was read last finds nothing of it: so the cache gets
only what it can keep, and hits every time.

The paper plans at initialization: the budgeter reads the page cache's budget and Algorithm 1 assigns the layers
(section IV-A). So n1 is planned for a batch, and again only for a larger one; a limit of the page cache that changes
later is not seen. `split` sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean

from kv_cache.block_table import BlockKey
from kv_cache.hardware import DIRECT, PAGE_CACHE
from kv_cache.iteration import Iteration
from kv_cache.policies._stream import Tickets, stream

INTRA, CROSS = 2, 3  # decode steps of the trial; the one before them warms up


def dual_blade(it: Iteration, ahead: int = 1, margin: int = 0, share: float | None = None) -> None:
    """Group 1 is layers below n1, Group 2 the others; each takes the pipeline that was faster in the trial.

    margin: layers that the cache could keep and does not. share: of all layers in Group 1, instead of by the cache.
    """
    if share is not None:
        it.memory["n1"] = max(0, int(share * len(it.layers)) - margin)
    elif len(it.batch) > it.memory.get("requests", 0):
        it.memory["requests"], it.memory["n1"] = len(it.batch), max(0, in_cache(it) - margin)
    n1: int = it.memory["n1"]
    group = first_group(it.layers.start + n1)
    pipelined(it, lambda block: PAGE_CACHE if group(block.layer) == 1 else DIRECT, ahead, group)


def in_cache(it: Iteration, tokens: int | None = None) -> int:
    """n1: how many layers the page cache keeps at their final length (Algorithm 1)."""
    final = max(it.final_tokens, *it.new.values()) if tokens is None else tokens
    return int(min(len(it.layers), it.capacity(PAGE_CACHE) // it.layer_bytes(final)))


def first_group(end: int) -> Callable[[int], int]:
    """Which group a layer is in: 1 below `end`, else 2."""
    return lambda layer: 1 if layer < end else 2


def pipelined(it: Iteration, home: Callable[[BlockKey], str], ahead: int, group: Callable[[int], int]) -> None:
    """Stream layers; K and V of one at once (intra) or one behind the other (cross), as the trial has shown."""
    step = it.memory["step"] = 0 if it.prefill else it.memory.get("step", 0) + 1
    if step <= CROSS:
        coming = stream(it, home, ahead, lambda layer: step == CROSS)
        it.memory.setdefault("trial", {})[step] = _seconds(coming, group)
        return
    if "faster" not in it.memory:
        intra, cross = it.memory["trial"][INTRA], it.memory["trial"][CROSS]
        it.memory["faster"] = {number: cross[number] < intra[number] for number in intra.keys() & cross.keys()}
    faster: dict[int, bool] = it.memory["faster"]
    stream(it, home, ahead, lambda layer: faster.get(group(layer), False))


def _seconds(coming: Tickets, group: Callable[[int], int]) -> dict[int, float]:
    """The mean time in which a layer of each group came."""
    took: dict[int, list[float]] = {}
    for layer, copies in coming.items():
        if copies:
            began = min(transfer.began_ns for _, transfer in copies)
            took.setdefault(group(layer), []).append(max(transfer.ended_ns for _, transfer in copies) - began)
    return {number: mean(each) for number, each in took.items()}
