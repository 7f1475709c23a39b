"""Allocation of tensors to block extents, and their requests (Dual-Blade, arXiv 2604.26557, Algorithm 2)."""

from __future__ import annotations

import errno
import os
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from csd_io.queue import IoRequest, Op, Queue


@dataclass(frozen=True, slots=True)
class Extent:
    """Consecutive blocks."""

    first_block: int
    blocks: int

    @property
    def end_block(self) -> int:
        """First block after it."""
        return self.first_block + self.blocks


def translate(
    extent: Extent, block_bytes: int, at_bytes: int, nbytes: int, max_bytes: int
) -> Iterator[tuple[int, int]]:
    """Split `nbytes` from byte `at_bytes` of an extent on into requests of at most `max_bytes`, in whole blocks.

    Raises:
        ValueError: The range is not aligned to blocks, or not within the extent.
    """
    chunk = max_bytes // block_bytes * block_bytes
    if (at_bytes | nbytes) % block_bytes or not 0 <= at_bytes <= extent.blocks * block_bytes - nbytes:
        raise ValueError(f"{nbytes} bytes at {at_bytes} of {extent.blocks} blocks of {block_bytes}")
    first = extent.first_block * block_bytes + at_bytes
    return ((at, min(chunk, first + nbytes - at)) for at in range(first, first + nbytes, chunk))


class Extents:
    """First-fit allocator: maps tensors to disjoint extents of a queue's blocks."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self._free = [Extent(0, queue.size_bytes // queue.block_bytes)]  # by first block, never adjacent
        self._bound: dict[Hashable, Extent] = {}

    def __getitem__(self, key: Hashable) -> Extent:
        return self._bound[key]

    def __contains__(self, key: Hashable) -> bool:
        return key in self._bound

    def bind(self, key: Hashable, nbytes: int) -> Extent:
        """Allocate blocks for a tensor of `nbytes` bytes.

        Raises:
            ValueError: The key is already bound, or the size is not positive.
            OSError: No free extent is large enough (ENOSPC).
        """
        if key in self._bound or nbytes < 1:
            raise ValueError(f"{key}: {'is bound' if key in self._bound else f'{nbytes} bytes'}")
        blocks = -(-nbytes // self.queue.block_bytes)
        for place, free in enumerate(self._free):
            if free.blocks >= blocks:
                rest = Extent(free.first_block + blocks, free.blocks - blocks)
                self._free[place : place + 1] = [rest] if rest.blocks else []
                self._bound[key] = Extent(free.first_block, blocks)
                return self._bound[key]
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {nbytes} bytes of {key}", self.queue.name)

    def release(self, key: Hashable, discard: bool = True) -> None:
        """Unbind a tensor, and optionally discard its blocks on the device, if it supports that."""
        extent = self._bound.pop(key)
        self._free = _merge([*self._free, extent])
        if discard:
            size = self.queue.block_bytes
            try:
                self.queue.discard(extent.first_block * size, extent.blocks * size)
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:
                    raise

    def requests(self, op: Op, key: Hashable, at_bytes: int, buffer: memoryview) -> Iterator[IoRequest]:
        """Yield requests that transfer a buffer from or to byte `at_bytes` of a tensor on; raises as `translate`."""
        queue, done = self.queue, 0
        parts = translate(self._bound[key], queue.block_bytes, at_bytes, buffer.nbytes, queue.max_bytes)
        for offset, size in parts:
            yield IoRequest(op, offset, buffer[done : done + size])
            done += size


def _merge(free: list[Extent]) -> list[Extent]:
    """Merge adjacent free extents."""
    merged: list[Extent] = []
    for extent in sorted(free, key=lambda extent: extent.first_block):
        assert not merged or merged[-1].end_block <= extent.first_block, (
            f"block {extent.first_block} was released twice"
        )
        if merged and merged[-1].end_block == extent.first_block:
            extent = Extent(merged[-1].first_block, merged.pop().blocks + extent.blocks)
        merged.append(extent)
    return merged
