"""Tutti: KV data of prefixes on SSDs; layers are prefetched during computation, new data is written in the slack.

arXiv 2605.03375. An SSD is slow at concurrent reads and writes, so they alternate. During a prefill, a write starts
only if the current layer takes longer than the reads in flight.
"""

from __future__ import annotations

from collections.abc import Iterable

from kv_cache.block_table import BlockKey, Transfer
from kv_cache.hardware import DEVICE, DIRECT
from kv_cache.iteration import Iteration
from kv_cache.scheduler import Policy

BLOCK_TOKENS = 64  # tokens of an object; in decode, smaller ones are not written yet


class Tutti(Policy):
    """Layers stay on the device while they fit; new data is written to `home`, `ahead` layers are prefetched.

    The slack table is the paper's: seconds of a layer by its new and stored tokens, measured in the first iteration of
    that shape. The first iteration of a shape writes only after all its reads.
    """

    tiers: tuple[str, ...] = (DIRECT,)

    def __init__(self, home: str = DIRECT, ahead: int = 1) -> None:
        self.home, self.ahead = home, ahead
        self._slack_s: dict[tuple[int, int], float] = {}

    def layers(self, it: Iteration) -> None:
        shape, home = (sum(it.new.values()), (it.layer_bytes() // len(it.batch)).bit_length()), self.home
        window_s = self._slack_s.get(shape, 0.0)
        grows = len(it.parts) * sum(map(it.new_bytes, it.batch))  # each layer
        reads, writes = list[Transfer](), list[Transfer]()
        for layer in it.layers:
            writes += _make_room(it, home, _missing_bytes(it, layer) + grows, layer, reads)
            for due in it.layers[layer - it.layers.start :][: self.ahead + 1]:
                if due == layer or _missing_bytes(it, due) + grows <= it.free_bytes(DEVICE):
                    copies = (it.copy(x, DEVICE, urgency=-due, after=writes) for x in it.blocks(due))
                    if came := [transfer for transfer in copies if transfer]:
                        reads, writes = came, []
            left_s = window_s - it.queued_s(home, DEVICE) if it.has_path(home, DEVICE) else 0.0
            writes += _write(it, home, _unwritten(it, home, layer), reads, left_s)
            it.attend(layer)
        self._slack_s.setdefault(shape, it.layer_s())
        _write(it, home, _unwritten(it, home, it.layers.stop), reads)


def _missing_bytes(it: Iteration, layer: int) -> int:
    """Bytes of a layer that are missing on the device."""
    return sum(it.missing_bytes(x, DEVICE) for x in it.blocks(layer))


def _unwritten(it: Iteration, home: str, end: int) -> list[BlockKey]:
    """Blocks below layer `end` that are incomplete in `home`; in decode, by at least `BLOCK_TOKENS` tokens."""
    below = (x for layer in range(it.layers.start, end) for x in it.blocks(layer))
    least = 1 if it.prefill else BLOCK_TOKENS
    return [x for x in below if it.missing_bytes(x, home) * it.tokens(x) >= least * it.nbytes(x)]


def _write(
    it: Iteration, home: str, owed: Iterable[BlockKey], after: list[Transfer], within_s: float = float("inf")
) -> list[Transfer]:
    """Write blocks to `home` after the given reads, as many as fit in `within_s` seconds."""
    begun = list[Transfer]()
    for block in owed:
        within_s -= it.transfer_s(DEVICE, home, it.missing_bytes(block, home))
        if within_s < 0:
            break
        if transfer := it.copy(block, home, source=DEVICE, after=after):
            begun.append(transfer)
    return begun


def _make_room(it: Iteration, home: str, need: float, keep: int, after: list[Transfer]) -> list[Transfer]:
    """Evict the least recently attended blocks until `need` bytes are free; returns the writes of evicted blocks."""
    begun = list[Transfer]()
    for block in it.blocks_at(DEVICE):
        if it.free_bytes(DEVICE) >= need:
            break
        if block.layer != keep or block.request not in it.batch:
            begun += _write(it, home, [block], after)
            it.drop(block, DEVICE)
    return begun
