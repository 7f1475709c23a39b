"""Simulated page cache of the kernel: LRU with a size limit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class PageCache:
    """LRU cache of pieces of files, with keys (file, piece number).

    Attributes:
        read_bytes: Bytes read so far.
        hit_bytes: Bytes of these found in the cache.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self.blocks_at = self.hit_bytes = self.read_bytes = 0
        self._pieces: OrderedDict[tuple[Hashable, int], int] = OrderedDict()

    def read(self, piece: tuple[Hashable, int], held: int, nbytes: int) -> bool:
        """Read `nbytes` of a piece; returns whether its first `held` bytes were cached, and caches them."""
        hit = self._pieces.get(piece, 0) >= held
        self.read_bytes += nbytes
        self.hit_bytes += nbytes if hit else 0
        self.put(piece, held)
        return hit

    def put(self, piece: tuple[Hashable, int], held: int) -> None:
        """Cache the first `held` bytes of a piece as the most recently used."""
        before = self._pieces.pop(piece, 0)
        self._pieces[piece] = max(held, before)
        self.blocks_at += self._pieces[piece] - before
        self._evict()

    def set_limit(self, limit_bytes: int | None) -> None:
        """Change the size, bytes; None: unlimited."""
        self.limit_bytes = limit_bytes
        self._evict()

    def _evict(self) -> None:
        while self.limit_bytes is not None and self.blocks_at > self.limit_bytes:
            self.blocks_at -= self._pieces.popitem(last=False)[1]
        assert self.blocks_at >= 0

    def forget(self, file: Hashable) -> None:
        """Drop all pieces of a deleted file."""
        for piece in [piece for piece in self._pieces if piece[0] == file]:
            self.blocks_at -= self._pieces.pop(piece)
        assert self.blocks_at >= 0

    @property
    def hit_share(self) -> float | None:
        """Hit rate by bytes; None if nothing was read."""
        return self.hit_bytes / self.read_bytes if self.read_bytes else None
