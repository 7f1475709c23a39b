"""Drive DRAM as pages under construction: the group buffers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ftl.errors import OutOfSpace
from ftl.memory import lazy_zeros

I64 = NDArray[np.int64]


class GroupBuffers:
    """A pool of page-sized buffers."""

    def __init__(self, dram_bytes: int, page_bytes: int) -> None:
        self.capacity = dram_bytes // page_bytes
        self.content: NDArray[np.uint8] = lazy_zeros((self.capacity, page_bytes), np.uint8)
        self._fresh = 0
        self._returned: list[int] = []

    @property
    def left(self) -> int:
        return self.capacity - self._fresh + len(self._returned)

    def allocate(self, count: int) -> I64:
        """`count` buffers, with whatever was in them; raises OutOfSpace before anything changes."""
        if count > self.left:
            raise OutOfSpace(f"{count} group buffers wanted, drive DRAM has room for {self.left}: free sequences first")
        again = min(count, len(self._returned))
        split = len(self._returned) - again
        slots = self._returned[split:] + list(range(self._fresh, self._fresh + count - again))
        del self._returned[split:]
        self._fresh += count - again
        return np.array(slots, np.int64)

    def release(self, slots: I64) -> None:
        """Give buffers back."""
        self._returned += slots.tolist()
