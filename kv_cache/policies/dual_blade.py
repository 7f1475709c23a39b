"""Dual-Blade: the first layers in buffered files, as many as fit in the page cache, the others with direct I/O.

arXiv 2604.26557. A cyclic access pattern larger than an LRU cache never hits. So the page cache gets only the layers
that fit, and always hits.

The paper plans at initialization: the budgeter reads the page cache's budget and Algorithm 1 assigns the layers
(section IV-A). So n1 is planned for a batch, and again only for a larger one; a later change of the page cache's limit
is ignored. `split` adapts to it.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean

from kv_cache.block_table import BlockKey
from kv_cache.hardware import DIRECT, PAGE_CACHE
from kv_cache.iteration import Iteration
from kv_cache.policies._stream import Tickets, stream
from kv_cache.scheduler import Policy

INTRA, CROSS = 2, 3  # decode steps of the trial; the one before them is a warm-up


class DualBlade(Policy):
    """Group 1 is the layers below n1, group 2 the others; each uses the pipeline that was faster in the trial.

    Args:
        ahead: Layers to prefetch.
        margin: Layers to leave out of group 1 although the page cache could hold them.
        share: Fraction of the layers in group 1; None: by the size of the page cache.

    Attributes:
        trial: Mean load time of a layer of each group, ns, by step of the trial.
    """

    tiers: tuple[str, ...] = (PAGE_CACHE, DIRECT)
    second_home = DIRECT  # of group 2

    def __init__(self, ahead: int = 1, margin: int = 0, share: float | None = None) -> None:
        self.ahead, self.margin, self.share = ahead, margin, share
        self.trial: dict[int, dict[int, float]] = {}
        self._requests = self._n1 = self._step = 0
        self._cross_is_faster: dict[int, bool] | None = None  # by group, after the first trial

    def layers(self, it: Iteration) -> None:
        if self.share is not None:
            self._n1 = max(0, int(self.share * len(it.layers)) - self.margin)
        elif len(it.batch) > self._requests:
            self._requests, self._n1 = len(it.batch), max(0, in_cache(it) - self.margin)
        self._step = 0 if it.prefill else self._step + 1
        group = first_group(it.layers.start + self._n1)

        def home(block: BlockKey) -> str:
            return PAGE_CACHE if group(block.layer) == 1 else self.second_home

        if self._step <= CROSS:
            coming = stream(it, home, self.ahead, lambda layer: self._step == CROSS)
            self.trial[self._step] = _seconds(coming, group)
            return
        if self._cross_is_faster is None:
            intra, cross = self.trial[INTRA], self.trial[CROSS]
            self._cross_is_faster = {number: cross[number] < intra[number] for number in intra.keys() & cross.keys()}
        faster = self._cross_is_faster
        stream(it, home, self.ahead, lambda layer: faster.get(group(layer), False))


def in_cache(it: Iteration, tokens: int | None = None) -> int:
    """n1: number of layers that the page cache holds at their final length (Algorithm 1)."""
    final = max(it.final_tokens, *it.new.values()) if tokens is None else tokens
    return int(min(len(it.layers), it.capacity(PAGE_CACHE) // it.layer_bytes(final)))


def first_group(end: int) -> Callable[[int], int]:
    """Group of a layer: 1 below `end`, else 2."""
    return lambda layer: 1 if layer < end else 2


def _seconds(coming: Tickets, group: Callable[[int], int]) -> dict[int, float]:
    """Mean load time of a layer of each group, ns."""
    took: dict[int, list[float]] = {}
    for layer, copies in coming.items():
        if copies:
            began = min(transfer.began_ns for _, transfer in copies)
            took.setdefault(group(layer), []).append(max(transfer.ended_ns for _, transfer in copies) - began)
    return {number: mean(times) for number, times in took.items()}
