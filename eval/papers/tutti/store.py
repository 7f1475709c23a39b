"""Stored prefixes by blocks: how many of a prompt's leading blocks are there, and who goes when there is no room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Store:
    """Blocks of prompts by the hash of all up to them. blocks: that it holds; None is any number.

    The block that was used longest ago goes, and none before those behind it: a prompt's blocks are used from the last
    to the first, so none is ever older than one that needs it.
    """

    def __init__(self, blocks: int | None) -> None:
        self.blocks = blocks
        self.written = 0
        self._used: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used)

    def leading(self, hashes: Sequence[int]) -> int:
        """How many of a prompt's first blocks are there."""
        for count, each in enumerate(hashes):
            if each not in self._used:
                return count
        return len(hashes)

    def put(self, hashes: Sequence[int]) -> None:
        """Keep a prompt's blocks: all of them, or the first that there is room for."""
        kept = hashes if self.blocks is None else hashes[: self.blocks]
        for each in reversed(kept):
            if each not in self._used:
                self._used[each] = None
                self.written += 1
            self._used.move_to_end(each)
        while self.blocks is not None and len(self._used) > self.blocks:
            self._used.popitem(last=False)
