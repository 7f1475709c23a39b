"""Layer-by-layer streaming through the device, shared by FlexGen, Dual-Blade and similar policies."""

from __future__ import annotations

from collections.abc import Callable

from kv_cache.block_table import BlockKey, Transfer
from kv_cache.hardware import DEVICE
from kv_cache.iteration import Iteration

Tickets = dict[int, list[tuple[BlockKey, Transfer]]]  # copies to the device, by layer


def stream(
    it: Iteration, home: Callable[[BlockKey], str], ahead: int, fifo: Callable[[int], bool] = lambda layer: False
) -> Tickets:
    """Prefetch up to `ahead` layers while they fit on the device, attend, and write new tokens back.

    Args:
        it: The iteration.
        home: Tier of a block between its uses.
        ahead: Layers to prefetch.
        fifo: Whether copies of a layer enter their first link one after the other.

    Returns:
        Copies to the device, by layer.
    """
    coming: Tickets = {}
    _leave_device(it, home)
    for layer in it.layers:
        for due in it.layers[layer - it.layers.start :][: ahead + 1]:
            if due not in coming and (due == layer or fits(it, layer, due)):
                copies = ((x, it.copy(x, DEVICE, urgency=-due, fifo=fifo(due))) for x in it.blocks(due))
                coming[due] = [(block, transfer) for block, transfer in copies if transfer]
        it.attend(layer)
        for block in it.blocks(layer):
            it.move(block, home(block))
    return coming


def _leave_device(it: Iteration, home: Callable[[BlockKey], str]) -> None:
    """Evict blocks if the device lacks space for new tokens: its limit fell, or another policy left them there."""
    growth = len(it.parts) * sum(map(it.new_bytes, it.batch))
    if it.free_bytes(DEVICE) < growth:
        for block in it.blocks_at(DEVICE):
            it.move(block, home(block))


def fits(it: Iteration, layer: int, due: int) -> bool:
    """Whether layer `due` fits on the device while layer `layer` still gets its new tokens."""
    there = [block for block in it.blocks(due) if DEVICE not in it.tiers_of(block)]
    growth = it.layer_bytes() - sum(it.nbytes(block) for block in it.blocks(layer))
    return it.free_bytes(DEVICE) >= sum(map(it.nbytes, there)) + growth
