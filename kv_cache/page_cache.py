"""The kernel's page cache: what was read or written last, up to a limit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class PageCache:
    """Least recently used first out, by pieces of files: (file, number).

    read_bytes, hit_bytes: asked for so far, and found.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self.blocks_at = self.hit_bytes = self.read_bytes = 0
        self._pieces: OrderedDict[tuple[Hashable, int], int] = OrderedDict()

    def read(self, piece: tuple[Hashable, int], held: int, nbytes: int) -> bool:
        """Whether the first `held` bytes of a piece are there, of which `nbytes` are read; they are afterwards."""
        hit = self._pieces.get(piece, 0) >= held
        self.read_bytes += nbytes
        self.hit_bytes += nbytes if hit else 0
        self.put(piece, held)
        return hit

    def put(self, piece: tuple[Hashable, int], held: int) -> None:
        """The first `held` bytes of a piece are there now, and the youngest."""
        before = self._pieces.pop(piece, 0)
        self._pieces[piece] = max(held, before)
        self.blocks_at += self._pieces[piece] - before
        self._evict()

    def set_limit(self, limit_bytes: int | None) -> None:
        """Change how many bytes are kept; None: all."""
        self.limit_bytes = limit_bytes
        self._evict()

    def _evict(self) -> None:
        while self.limit_bytes is not None and self.blocks_at > self.limit_bytes:
            self.blocks_at -= self._pieces.popitem(last=False)[1]

    def forget(self, file: Hashable) -> None:
        """A file is gone: all its pieces, (file, number)."""
        for piece in [piece for piece in self._pieces if piece[0] == file]:
            self.blocks_at -= self._pieces.pop(piece)

    @property
    def hit_share(self) -> float | None:
        """Of the bytes that were read; None where none were."""
        return self.hit_bytes / self.read_bytes if self.read_bytes else None
