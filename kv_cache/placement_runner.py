"""Execute a placement: the tier of each layer of each request, given before each iteration.

Layers of other tiers are loaded for their attention and dropped afterwards. A block that does not fit in its tier goes
to a lower one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from kv_cache.block_table import BlockKey
from kv_cache.hardware import CSD, DEVICE, DIRECT
from kv_cache.iteration import Iteration

GOLDEN = 0.6180339887498949  # its multiples modulo 1 are spread evenly
Homes = Callable[[Hashable, int], tuple[str, ...]]


def carry_out(it: Iteration) -> None:
    """Execute the placement in `it.memory["homes"]`: the tier of each block of a layer of a request.

    At most `it.memory["buffers"]` offloaded layers of a request are on the device at once (default: 2). With one tier
    more than there are blocks, new tokens start another block. A single new token is attended in drives if the last
    block is there; several new tokens, and all other blocks, are attended on the device.
    """
    for block in it.blocks_at(DEVICE):
        if _assigned_tier(it, block) != DEVICE:
            _return_block(it, block)
    spill(it)
    it.memory["returning"] = returning(it)
    for layer in it.layers:
        together: dict[tuple[str, ...], list[Hashable]] = {}
        for row in it.batch:
            together.setdefault(_attention_tiers(it, row, layer), []).append(row)
        for at, rows in sorted(together.items(), key=lambda item: CSD in item[0]):  # drive calls last
            for group in _groups(it, layer, rows, at):
                _attend(it, layer, group, at)


def spill(it: Iteration, need: int = 0) -> None:
    """Move blocks down after the limit of the tier below the device fell, those of the last rows first.

    Args:
        it: The iteration.
        need: Bytes to free in that tier.
    """
    below = it.memory["below"]
    if it.free_bytes(below) < need and it.has_path(below, DIRECT):
        for block in sorted(it.blocks_at(below), key=lambda block: -_place(it, block)):
            if it.free_bytes(below) >= need:
                break
            it.move(block, DIRECT)


def _place(it: Iteration, block: BlockKey) -> int:
    """Row of a block in the batch; blocks of other requests come last."""
    return it.batch.index(block.request) if block.request in it.batch else len(it.batch)


def returning(it: Iteration, need: int = 0) -> set[BlockKey]:
    """Choose file blocks of the batch that fit in the tier below the device again, spread over the layers.

    Spreading lets the remaining file reads overlap with layers from that tier.

    Args:
        it: The iteration.
        need: Bytes to leave free in that tier.
    """
    room, chosen = it.free_bytes(it.memory["below"]) - need, set[BlockKey]()
    here = [block for block in it.blocks_at(DIRECT) if block.request in it.batch]
    blocks = sorted(here, key=lambda block: (block.layer, _place(it, block)))
    for _, block in sorted(enumerate(blocks), key=lambda numbered: numbered[0] * GOLDEN % 1):
        room -= it.nbytes(block)
        if room < 0:
            break
        chosen.add(block)
    return chosen


def _groups(it: Iteration, layer: int, rows: list[Hashable], at: tuple[str, ...]) -> list[list[Hashable]]:
    """Split rows into groups for one call: all if they fit, else the resident rows, and each other row alone."""
    growth = sum(map(it.new_bytes, rows)) * len(it.parts)
    lacking = sum(it.missing_bytes(x, DEVICE) for x in it.blocks(layer, rows) if at[x.index] == DEVICE)
    if DEVICE not in at or lacking + growth <= it.free_bytes(DEVICE):
        return [rows]
    stay = [row for row in rows if all(_assigned_tier(it, block) == DEVICE for block in it.blocks(layer, [row]))]
    need = sum(map(it.nbytes, it.blocks(layer, stay))) + sum(map(it.new_bytes, stay)) * len(it.parts)
    if need > it.capacity(DEVICE):
        stay = []
    return [group for group in (stay, *([row] for row in rows if row not in stay)) if group]


def _attention_tiers(it: Iteration, row: Hashable, layer: int) -> tuple[str, ...]:
    """Tier in which each block of a row is attended."""
    homes: Homes = it.memory["homes"]
    blocks, tiers = len(it.blocks(layer, [row])) // len(it.parts), homes(row, layer)
    count = max(blocks, min(blocks + 1, len(tiers)))
    last = CSD if it.new[row] == 1 and blocks and tiers[-1] == CSD else DEVICE
    return (*(DEVICE,) * (count - 1), last)


def _attend(it: Iteration, layer: int, rows: list[Hashable], at: tuple[str, ...]) -> None:
    """Load the blocks of a layer, attend, and return them to their tiers."""
    for block in it.blocks(layer, rows):
        _page_in(it, block, at[block.index], rows)
    growth = sum(map(it.new_bytes, rows)) * len(it.parts) if at[-1] == DEVICE else 0
    _make_room(it, growth, layer, rows)
    _prefetch_layers(it, layer, rows, growth)
    it.attend(layer, rows, at=at)
    for block in it.blocks(layer, rows):
        _return_block(it, block)


def _page_in(it: Iteration, block: BlockKey, tier: str, rows: list[Hashable]) -> None:
    """Copy a block to a tier, through the device if no direct route exists."""
    if tier in it.tiers_of(block):
        return
    if not any(it.has_path(source, tier) for source in it.tiers_of(block)):
        _page_in(it, block, DEVICE, rows)
    if tier == DEVICE:
        _make_room(it, it.missing_bytes(block, DEVICE), block.layer, rows)
    it.copy(block, tier)


def _prefetch_layers(it: Iteration, layer: int, rows: list[Hashable], reserve: int) -> None:
    """Prefetch the next offloaded layers of the rows while they fit.

    Args:
        it: The iteration.
        layer: Layer that is attended now.
        rows: Rows to prefetch for.
        reserve: Bytes to leave free on the device.
    """
    buffers: Callable[[Hashable], int] = it.memory.get("buffers", lambda row: 2)
    for row in rows:
        left = buffers(row) - bool(_transient_blocks(it, row, layer))
        for due in range(layer + 1, it.layers.stop):
            if left <= 0:
                break
            passing = _transient_blocks(it, row, due)
            away = [x for x in passing if DEVICE not in it.tiers_of(x)]
            left -= bool(passing)
            need = reserve + sum(it.missing_bytes(x, DEVICE) for x in away) + it.new_bytes(row) * len(it.parts)
            if away and (it.free_bytes(DEVICE) < need or not all(_reachable(it, x) for x in away)):
                break
            for block in away:
                it.copy(block, DEVICE, urgency=-due)


def _transient_blocks(it: Iteration, row: Hashable, layer: int) -> list[BlockKey]:
    """Blocks of a layer that are on the device only for its attention, or are still missing there."""
    at = _attention_tiers(it, row, layer)
    here = [x for x in it.blocks(layer, [row]) if at[x.index] == DEVICE]
    return [x for x in here if _assigned_tier(it, x) != DEVICE or DEVICE not in it.tiers_of(x)]


def _reachable(it: Iteration, block: BlockKey) -> bool:
    """Whether a route leads from a tier of the block to the device."""
    return any(it.has_path(tier, DEVICE) for tier in it.tiers_of(block))


def _make_room(it: Iteration, need: int, layer: int, rows: list[Hashable]) -> None:
    """Evict the blocks used last from the device until `need` bytes are free; rows that are attended now stay."""
    count = len(it.layers)

    def due(block: BlockKey) -> int:
        return (block.layer - layer) % count if block.request in it.batch else count

    for block in sorted(it.blocks_at(DEVICE), key=due, reverse=True):
        if it.free_bytes(DEVICE) >= need:
            return
        if block.layer != layer or block.request not in rows:
            _return_block(it, block, lower=True)


def _return_block(it: Iteration, block: BlockKey, lower: bool = False) -> None:
    """Move a block to its assigned tier; with `lower`, below the device if that is the device."""
    home = _assigned_tier(it, block)
    if home == DEVICE and not lower:
        if DEVICE in it.tiers_of(block):
            it.move(block, DEVICE)
        return
    below = it.memory["below"] if home == DEVICE else home
    in_files = it.missing_bytes(block, DIRECT) < it.nbytes(block)
    stays = in_files and below == it.memory["below"] and block not in it.memory["returning"]
    to = DIRECT if stays or it.free_bytes(below) < it.missing_bytes(block, below) else below
    if to in it.tiers_of(block) or any(it.has_path(tier, to) for tier in it.tiers_of(block)):
        it.move(block, to)


def _assigned_tier(it: Iteration, block: BlockKey) -> str:
    """Assigned tier of a block; only the last block of a row may be in drives."""
    homes: Homes = it.memory["homes"]
    tiers = homes(block.request, block.layer)
    home = tiers[min(block.index, len(tiers) - 1)]
    last = len(it.blocks(block.layer, [block.request])) // len(it.parts) - 1
    below: str = it.memory["below"]
    return below if home == CSD and block.index < last else home
