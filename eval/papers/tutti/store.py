"""Block store of prefixes: lookup of a prompt's leading blocks, and LRU eviction when it is full."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockStore:
    """Blocks of prompts by the hash of all blocks up to them. blocks: capacity; None is unlimited.

    The least recently used block is evicted, and none before those that follow it: a prompt's blocks are used from the
    last to the first, so a block is never older than one that depends on it.
    """

    def __init__(self, blocks: int | None) -> None:
        self.blocks = blocks
        self.written = 0
        self._used: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used)

    def leading(self, hashes: Sequence[int]) -> int:
        """Number of a prompt's leading blocks that are stored."""
        for count, key in enumerate(hashes):
            if key not in self._used:
                return count
        return len(hashes)

    def put(self, hashes: Sequence[int]) -> None:
        """Store a prompt's blocks: all of them, or the leading ones that fit."""
        stored = hashes if self.blocks is None else hashes[: self.blocks]
        for key in reversed(stored):
            if key not in self._used:
                self._used[key] = None
                self.written += 1
            self._used.move_to_end(key)
        while self.blocks is not None and len(self._used) > self.blocks:
            self._used.popitem(last=False)
