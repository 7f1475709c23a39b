"""Execute an assignment: the tier of each layer of each request, decided before each iteration.

Layers of other tiers are loaded for their attention and dropped afterwards. A block that does not fit in its tier goes
to a lower one.
"""

from __future__ import annotations

from collections.abc import Hashable

from kv_cache.block_table import BlockKey
from kv_cache.hardware import CSD, DEVICE, DIRECT
from kv_cache.iteration import Iteration, Tiers

GOLDEN = 0.6180339887498949  # its multiples modulo 1 are spread evenly


def spill(it: Iteration, need: int = 0) -> None:
    """Move blocks down after the limit of the tier below the device fell, those of the last rows first.

    Args:
        it: The iteration.
        need: Bytes to free in that tier.
    """
    if it.free_bytes(it.below) < need and it.has_path(it.below, DIRECT):
        for block in sorted(it.blocks_at(it.below), key=lambda block: -_place(it, block)):
            if it.free_bytes(it.below) >= need:
                break
            it.move(block, DIRECT)


def returning(it: Iteration, need: int = 0) -> set[BlockKey]:
    """Choose file blocks of the batch that fit in the tier below the device again, spread over the layers.

    Spreading lets the remaining file reads overlap with layers from that tier.

    Args:
        it: The iteration.
        need: Bytes to leave free in that tier.
    """
    room, chosen = it.free_bytes(it.below) - need, set[BlockKey]()
    here = [block for block in it.blocks_at(DIRECT) if block.request in it.batch]
    blocks = sorted(here, key=lambda block: (block.layer, _place(it, block)))
    for _, block in sorted(enumerate(blocks), key=lambda numbered: numbered[0] * GOLDEN % 1):
        room -= it.nbytes(block)
        if room < 0:
            break
        chosen.add(block)
    return chosen


def _place(it: Iteration, block: BlockKey) -> int:
    """Row of a block in the batch; blocks of other requests come last."""
    return it.batch.index(block.request) if block.request in it.batch else len(it.batch)


class PlacementRunner:
    """Program of an iteration that executes its assignment.

    At most `buffers` offloaded layers of a request are on the device at once. With one tier more than there are blocks,
    new tokens start another block. A single new token is attended in drives if the last block is there; several new
    tokens, and all other blocks, are attended on the device.
    """

    def __init__(self, it: Iteration) -> None:
        self.it = it
        self._returning: set[BlockKey] = set()  # blocks in files that leave them for the tier below the device

    def run(self) -> None:
        """Attend all layers."""
        it = self.it
        for block in it.blocks_at(DEVICE):
            if self._assigned_tier(block) != DEVICE:
                self._return_block(block)
        spill(it)
        self._returning = returning(it)
        for layer in it.layers:
            together: dict[Tiers, list[Hashable]] = {}
            for row in it.batch:
                together.setdefault(self._attention_tiers(row, layer), []).append(row)
            for at, rows in sorted(together.items(), key=lambda item: CSD in item[0]):  # drive calls last
                for group in self._groups(layer, rows, at):
                    self._attend(layer, group, at)

    def _groups(self, layer: int, rows: list[Hashable], at: Tiers) -> list[list[Hashable]]:
        """Split rows into groups for one call: all if they fit, else the resident rows, and each other row alone."""
        it = self.it
        lacking = sum(it.missing_bytes(x, DEVICE) for x in it.blocks(layer, rows) if at[x.index] == DEVICE)
        if DEVICE not in at or lacking + self._growth(rows) <= it.free_bytes(DEVICE):
            return [rows]
        stay = [row for row in rows if all(self._assigned_tier(x) == DEVICE for x in it.blocks(layer, [row]))]
        if sum(map(it.nbytes, it.blocks(layer, stay))) + self._growth(stay) > it.capacity(DEVICE):
            stay = []
        return [group for group in (stay, *([row] for row in rows if row not in stay)) if group]

    def _growth(self, rows: list[Hashable]) -> int:
        """Bytes that this iteration adds to a layer of these rows."""
        return sum(map(self.it.new_bytes, rows)) * len(self.it.parts)

    def _attention_tiers(self, row: Hashable, layer: int) -> Tiers:
        """Tier in which each block of a row is attended."""
        blocks, tiers = self._block_count(row, layer), self.it.assignment.tiers(row, layer)
        count = max(blocks, min(blocks + 1, len(tiers)))
        last = CSD if self.it.new[row] == 1 and blocks and tiers[-1] == CSD else DEVICE
        return (*(DEVICE,) * (count - 1), last)

    def _block_count(self, row: Hashable, layer: int) -> int:
        return len(self.it.blocks(layer, [row])) // len(self.it.parts)

    def _attend(self, layer: int, rows: list[Hashable], at: Tiers) -> None:
        """Load the blocks of a layer, attend, and return them to their tiers."""
        it = self.it
        for block in it.blocks(layer, rows):
            self._page_in(block, at[block.index], rows)
        growth = self._growth(rows) if at[-1] == DEVICE else 0
        self._make_room(growth, layer, rows)
        self._prefetch_layers(layer, rows, growth)
        it.attend(layer, rows, at=at)
        for block in it.blocks(layer, rows):
            self._return_block(block)

    def _page_in(self, block: BlockKey, tier: str, rows: list[Hashable]) -> None:
        """Copy a block to a tier, through the device if no direct route exists."""
        it = self.it
        if tier in it.tiers_of(block):
            return
        if not self._reaches(block, tier):
            self._page_in(block, DEVICE, rows)
        if tier == DEVICE:
            self._make_room(it.missing_bytes(block, DEVICE), block.layer, rows)
        it.copy(block, tier)

    def _prefetch_layers(self, layer: int, rows: list[Hashable], reserve: int) -> None:
        """Prefetch the next offloaded layers of the rows while they fit.

        Args:
            layer: Layer that is attended now.
            rows: Rows to prefetch for.
            reserve: Bytes to leave free on the device.
        """
        it = self.it
        for row in rows:
            left = it.assignment.buffers(row) - bool(self._transient_blocks(row, layer))
            for due in range(layer + 1, it.layers.stop):
                if left <= 0:
                    break
                passing = self._transient_blocks(row, due)
                away = [x for x in passing if DEVICE not in it.tiers_of(x)]
                left -= bool(passing)
                need = reserve + sum(it.missing_bytes(x, DEVICE) for x in away) + self._growth([row])
                if away and (it.free_bytes(DEVICE) < need or not all(self._reaches(x, DEVICE) for x in away)):
                    break
                for block in away:
                    it.copy(block, DEVICE, urgency=-due)

    def _transient_blocks(self, row: Hashable, layer: int) -> list[BlockKey]:
        """Blocks of a layer that are on the device only for its attention, or are still missing there."""
        at = self._attention_tiers(row, layer)
        here = [x for x in self.it.blocks(layer, [row]) if at[x.index] == DEVICE]
        return [x for x in here if self._assigned_tier(x) != DEVICE or DEVICE not in self.it.tiers_of(x)]

    def _reaches(self, block: BlockKey, to: str) -> bool:
        """Whether a route leads from a tier of the block to another tier."""
        return any(self.it.has_path(tier, to) for tier in self.it.tiers_of(block))

    def _make_room(self, need: int, layer: int, rows: list[Hashable]) -> None:
        """Evict the blocks used last from the device until `need` bytes are free; rows that are attended now stay."""
        it, count = self.it, len(self.it.layers)

        def due(block: BlockKey) -> int:
            return (block.layer - layer) % count if block.request in it.batch else count

        for block in sorted(it.blocks_at(DEVICE), key=due, reverse=True):
            if it.free_bytes(DEVICE) >= need:
                return
            if block.layer != layer or block.request not in rows:
                self._return_block(block, lower=True)

    def _return_block(self, block: BlockKey, lower: bool = False) -> None:
        """Move a block to its assigned tier; with `lower`, below the device if that is the device."""
        it, home = self.it, self._assigned_tier(block)
        if home == DEVICE and not lower:
            if DEVICE in it.tiers_of(block):
                it.move(block, DEVICE)
            return
        below = it.below if home == DEVICE else home
        in_files = it.missing_bytes(block, DIRECT) < it.nbytes(block)
        stays = in_files and below == it.below and block not in self._returning
        to = DIRECT if stays or it.free_bytes(below) < it.missing_bytes(block, below) else below
        if to in it.tiers_of(block) or self._reaches(block, to):
            it.move(block, to)

    def _assigned_tier(self, block: BlockKey) -> str:
        """Assigned tier of a block; only the last block of a row may be in drives."""
        tiers = self.it.assignment.tiers(block.request, block.layer)
        home = tiers[min(block.index, len(tiers) - 1)]
        last = self._block_count(block.request, block.layer) - 1
        return self.it.below if home == CSD and block.index < last else home
