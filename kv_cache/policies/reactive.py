"""On-demand swapping of layers, least recently used first: a layer moves when it is due, and the model waits."""

from __future__ import annotations

from kv_cache.block_table import BlockKey, Transfer
from kv_cache.hardware import DEVICE, DIRECT, HOST
from kv_cache.iteration import Iteration
from kv_cache.scheduler import Policy

BELOW = {DEVICE: HOST, HOST: DIRECT}


class Reactive(Policy):
    """The KV cache is in the highest tiers; a layer that is not on the device is loaded when it is used."""

    def layers(self, it: Iteration) -> None:
        for layer in it.layers:
            need = it.layer_bytes() - sum(it.nbytes(x) for x in it.blocks(layer) if DEVICE in it.tiers_of(x))
            make_room(it, DEVICE, need, keep=layer)
            it.wait(*[page_in(it, block, layer) for block in it.blocks(layer)])
            it.attend(layer)


def page_in(it: Iteration, block: BlockKey, keep: int) -> Transfer | None:
    """Move a block to the device, through the host if no direct route exists."""
    if DEVICE in it.tiers_of(block):
        return None
    if not any(it.has_path(tier, DEVICE) for tier in it.tiers_of(block)):
        make_room(it, HOST, it.nbytes(block), keep)
        it.move(block, HOST)
    return it.move(block, DEVICE)


def make_room(it: Iteration, tier: str, need: float, keep: int) -> None:
    """Evict the least recently attended blocks until `need` bytes are free; layer `keep` of the batch stays."""
    for block in it.blocks_at(tier):
        if it.free_bytes(tier) >= need:
            return
        if block.layer == keep and block.request in it.batch:
            continue
        below = BELOW.get(tier)
        while below and (not it.has_path(tier, below) or it.free_bytes(below) < it.nbytes(block)):
            below = BELOW.get(below)
        if below:
            it.move(block, below)
