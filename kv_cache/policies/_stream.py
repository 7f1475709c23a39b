"""Layer after layer through the device: what FlexGen, Dual-Blade and their kin have in common."""

from __future__ import annotations

from collections.abc import Callable

from kv_cache.block_table import BlockKey, Transfer
from kv_cache.hardware import DEVICE
from kv_cache.iteration import Iteration

Tickets = dict[int, list[tuple[BlockKey, Transfer]]]  # of copies to the device, by layer


def stream(
    it: Iteration, home: Callable[[BlockKey], str], ahead: int, fifo: Callable[[int], bool] = lambda layer: False
) -> Tickets:
    """Bring layers `ahead` of their iteration, as far as the device has room; attend; send what is new home.

    fifo: whether copies of a layer enter their first link one after the other.
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
    """Send blocks home from a device that lacks room for new tokens: its limit fell, or another policy left them."""
    growth = len(it.parts) * sum(map(it.new_bytes, it.batch))
    if it.free_bytes(DEVICE) < growth:
        for block in it.blocks_at(DEVICE):
            it.move(block, home(block))


def fits(it: Iteration, layer: int, due: int) -> bool:
    """Whether a layer can come while an earlier one is still to get its new tokens."""
    there = [block for block in it.blocks(due) if DEVICE not in it.tiers_of(block)]
    growth = it.layer_bytes() - sum(it.nbytes(block) for block in it.blocks(layer))
    return it.free_bytes(DEVICE) >= sum(map(it.nbytes, there)) + growth
