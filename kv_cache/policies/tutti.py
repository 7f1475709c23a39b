"""Tutti: K and V of prefixes on SSDs; layers come while others are computed, what is new goes there in the slack.

arXiv 2605.03375. Reads and writes that an SSD gets together are slow, so one waits for the other: beside a prompt a
write begins only where the layer under way takes longer than what is read meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable

from kv_cache.block_table import BlockKey, Transfer
from kv_cache.hardware import DEVICE, DIRECT
from kv_cache.iteration import Iteration

BLOCK_TOKENS = 64  # of an object: in decode fewer are not written yet


def tutti(it: Iteration, home: str = DIRECT, ahead: int = 1) -> None:
    """Layers stay on the device as long as it has room; `home` gets what is new of them.

    The memory's "slack" is the paper's table: seconds of a layer by its new and stored tokens, as the first
    iteration of that shape took them; the first iteration of a shape writes once all of it has been read.
    """
    shape = sum(it.new.values()), (it.layer_bytes() // len(it.batch)).bit_length()
    window_s = it.memory.setdefault("slack", {}).get(shape, 0.0)
    grows = len(it.parts) * sum(map(it.new_bytes, it.batch))  # each layer
    reads, writes = list[Transfer](), list[Transfer]()
    for layer in it.layers:
        writes += _make_room(it, home, _lacking(it, layer) + grows, layer, reads)
        for due in it.layers[layer - it.layers.start :][: ahead + 1]:
            if due == layer or _lacking(it, due) + grows <= it.free_bytes(DEVICE):
                copies = (it.copy(x, DEVICE, urgency=-due, after=writes) for x in it.blocks(due))
                if came := [transfer for transfer in copies if transfer]:
                    reads, writes = came, []
        left_s = window_s - it.queued_s(home, DEVICE) if it.has_path(home, DEVICE) else 0.0
        writes += _write(it, home, _owed(it, home, layer), reads, left_s)
        it.attend(layer)
    it.memory["slack"].setdefault(shape, it.layer_s())
    _write(it, home, _owed(it, home, it.layers.stop), reads)


def _lacking(it: Iteration, layer: int) -> int:
    """Bytes of a layer that the device has not."""
    return sum(it.missing_bytes(x, DEVICE) for x in it.blocks(layer))


def _owed(it: Iteration, home: str, end: int) -> list[BlockKey]:
    """Blocks below a layer of which the home lacks something; in decode, a block of it."""
    below = (x for layer in range(it.layers.start, end) for x in it.blocks(layer))
    least = 1 if it.prefill else BLOCK_TOKENS
    return [x for x in below if it.missing_bytes(x, home) * it.tokens(x) >= least * it.nbytes(x)]


def _write(
    it: Iteration, home: str, owed: Iterable[BlockKey], after: list[Transfer], within_s: float = float("inf")
) -> list[Transfer]:
    """Let the home have blocks too, as many as can be written in a time, when what is read has come."""
    begun = list[Transfer]()
    for block in owed:
        within_s -= it.transfer_s(DEVICE, home, it.missing_bytes(block, home))
        if within_s < 0:
            break
        if transfer := it.copy(block, home, source=DEVICE, after=after):
            begun.append(transfer)
    return begun


def _make_room(it: Iteration, home: str, need: float, keep: int, after: list[Transfer]) -> list[Transfer]:
    """Leave the device with what was attended longest ago, until so many bytes fit; what is written for that."""
    begun = list[Transfer]()
    for block in it.blocks_at(DEVICE):
        if it.free_bytes(DEVICE) >= need:
            break
        if block.layer != keep or block.request not in it.batch:
            begun += _write(it, home, [block], after)
            it.drop(block, DEVICE)
    return begun
