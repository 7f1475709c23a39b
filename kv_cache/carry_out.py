"""Follow an assignment: before each iteration the server says in which tier every layer of each request lies.

What lies elsewhere is brought for its attention and leaves again; what does not fit where it should lie goes lower.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from kv_cache.block_table import BlockKey
from kv_cache.hardware import CSD, DEVICE, DIRECT
from kv_cache.iteration import Iteration

GOLDEN = 0.6180339887498949  # its multiples modulo 1 are spread evenly
Homes = Callable[[Hashable, int], tuple[str, ...]]


def carry_out(it: Iteration) -> None:
    """Carry out the memory's "homes": of a layer of a request, the tier of each of its blocks.

    Of layers that lie elsewhere the device holds at most as many of a request at once as the memory's "buffers" says,
    two by default. With one tier more than there are blocks the new tokens begin another one. One new token is attended
    in drives if the last block lies there; several, and all other blocks, on the device.
    """
    for block in it.blocks_at(DEVICE):
        if _home(it, block) != DEVICE:
            _send(it, block)
    spill(it)
    it.memory["returning"] = returning(it)
    for layer in it.layers:
        together: dict[tuple[str, ...], list[Hashable]] = {}
        for row in it.batch:
            together.setdefault(_attended(it, row, layer), []).append(row)
        for at, rows in sorted(together.items(), key=lambda each: CSD in each[0]):  # what is on its way comes for all
            for group in _groups(it, layer, rows, at):
                _attend(it, layer, group, at)


def spill(it: Iteration, need: int = 0) -> None:
    """Blocks that the tier below the device lacks room for, since its limit fell, go lower: the last rows' first.

    need: Bytes that are free there afterwards.
    """
    below = it.memory["below"]
    if it.free_bytes(below) < need and it.has_path(below, DIRECT):
        for block in sorted(it.blocks_at(below), key=lambda each: -_place(it, each)):
            if it.free_bytes(below) >= need:
                break
            it.move(block, DIRECT)


def _place(it: Iteration, block: BlockKey) -> int:
    """The number of a block's row in the batch; those of others come last."""
    return it.batch.index(block.request) if block.request in it.batch else len(it.batch)


def returning(it: Iteration, need: int = 0) -> set[BlockKey]:
    """Blocks of the batch in files that the tier below the device has room for again, spread over the layers.

    The others are then read while layers between them come from that tier. need: Bytes that stay free there.
    """
    room, found = it.free_bytes(it.memory["below"]) - need, set[BlockKey]()
    here = [block for block in it.blocks_at(DIRECT) if block.request in it.batch]
    blocks = sorted(here, key=lambda each: (each.layer, _place(it, each)))
    for _, block in sorted(enumerate(blocks), key=lambda each: each[0] * GOLDEN % 1):
        room -= it.nbytes(block)
        if room < 0:
            break
        found.add(block)
    return found


def _groups(it: Iteration, layer: int, rows: list[Hashable], at: tuple[str, ...]) -> list[list[Hashable]]:
    """Rows that are attended at once: all if the device has room, else those that stay there, and each other alone."""
    growth = sum(map(it.new_bytes, rows)) * len(it.parts)
    lacking = sum(it.missing_bytes(x, DEVICE) for x in it.blocks(layer, rows) if at[x.index] == DEVICE)
    if DEVICE not in at or lacking + growth <= it.free_bytes(DEVICE):
        return [rows]
    stay = [row for row in rows if all(_home(it, block) == DEVICE for block in it.blocks(layer, [row]))]
    need = sum(map(it.nbytes, it.blocks(layer, stay))) + sum(map(it.new_bytes, stay)) * len(it.parts)
    if need > it.capacity(DEVICE):
        stay = []
    return [group for group in (stay, *([row] for row in rows if row not in stay)) if group]


def _attended(it: Iteration, row: Hashable, layer: int) -> tuple[str, ...]:
    """Where each block of a row is attended."""
    homes: Homes = it.memory["homes"]
    blocks, tiers = len(it.blocks(layer, [row])) // len(it.parts), homes(row, layer)
    count = max(blocks, min(blocks + 1, len(tiers)))
    last = CSD if it.new[row] == 1 and blocks and tiers[-1] == CSD else DEVICE
    return (*(DEVICE,) * (count - 1), last)


def _attend(it: Iteration, layer: int, rows: list[Hashable], at: tuple[str, ...]) -> None:
    """Bring what rows have of a layer, attend, and send it home."""
    for block in it.blocks(layer, rows):
        _bring(it, block, at[block.index], rows)
    growth = sum(map(it.new_bytes, rows)) * len(it.parts) if at[-1] == DEVICE else 0
    _make_room(it, growth, layer, rows)
    _ahead(it, layer, rows, growth)
    it.attend(layer, rows, at=at)
    for block in it.blocks(layer, rows):
        _send(it, block)


def _bring(it: Iteration, block: BlockKey, tier: str, rows: list[Hashable]) -> None:
    """Let a tier have all of a block, by way of the device where there is no other."""
    if tier in it.tiers_of(block):
        return
    if not any(it.has_path(source, tier) for source in it.tiers_of(block)):
        _bring(it, block, DEVICE, rows)
    if tier == DEVICE:
        _make_room(it, it.missing_bytes(block, DEVICE), block.layer, rows)
    it.copy(block, tier)


def _ahead(it: Iteration, layer: int, rows: list[Hashable], kept: int) -> None:
    """Have the next layers come that a row attends on the device and that lie elsewhere, where there is room for them
    and so many bytes more."""
    buffers: Callable[[Hashable], int] = it.memory.get("buffers", lambda row: 2)
    for row in rows:
        left = buffers(row) - bool(_passing(it, row, layer))
        for due in range(layer + 1, it.layers.stop):
            if left <= 0:
                break
            passing = _passing(it, row, due)
            away = [x for x in passing if DEVICE not in it.tiers_of(x)]
            left -= bool(passing)
            need = kept + sum(it.missing_bytes(x, DEVICE) for x in away) + it.new_bytes(row) * len(it.parts)
            if away and (it.free_bytes(DEVICE) < need or not all(_reachable(it, x) for x in away)):
                break
            for block in away:
                it.copy(block, DEVICE, urgency=-due)


def _passing(it: Iteration, row: Hashable, layer: int) -> list[BlockKey]:
    """What of a layer is on the device for its attention alone, or is still to come."""
    at = _attended(it, row, layer)
    here = [x for x in it.blocks(layer, [row]) if at[x.index] == DEVICE]
    return [x for x in here if _home(it, x) != DEVICE or DEVICE not in it.tiers_of(x)]


def _reachable(it: Iteration, block: BlockKey) -> bool:
    """Whether the device can be reached from where a block is."""
    return any(it.has_path(tier, DEVICE) for tier in it.tiers_of(block))


def _make_room(it: Iteration, need: int, layer: int, rows: list[Hashable]) -> None:
    """Let what is due last leave the device, until so many bytes fit; the rows that are attended now stay."""
    count = len(it.layers)

    def due(block: BlockKey) -> int:
        return (block.layer - layer) % count if block.request in it.batch else count

    for block in sorted(it.blocks_at(DEVICE), key=due, reverse=True):
        if it.free_bytes(DEVICE) >= need:
            return
        if block.layer != layer or block.request not in rows:
            _send(it, block, lower=True)


def _send(it: Iteration, block: BlockKey, lower: bool = False) -> None:
    """Let a block lie at home alone. lower: or, where that is the device, below it."""
    home = _home(it, block)
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


def _home(it: Iteration, block: BlockKey) -> str:
    """Where a block is to lie; of a row's blocks only the last one may lie in drives."""
    homes: Homes = it.memory["homes"]
    tiers = homes(block.request, block.layer)
    home = tiers[min(block.index, len(tiers) - 1)]
    last = len(it.blocks(block.layer, [block.request])) // len(it.parts) - 1
    below: str = it.memory["below"]
    return below if home == CSD and block.index < last else home
