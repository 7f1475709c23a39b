"""Which drive has which KV heads, and attends for which query heads."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from csd_spec import ModelShape


@dataclass(frozen=True, slots=True)
class Share:
    """A drive's part of a model: the KV heads that it stores, and the query heads that it attends for."""

    kv_heads: range
    q_heads: range

    @property
    def group(self) -> int:
        """Query heads that share a KV head in this drive."""
        return len(self.q_heads) // len(self.kv_heads)


def split_heads(kv_heads: int, drives: int) -> list[range]:
    """Consecutive KV heads for each drive, as even as they go; a query group follows its KV head.

    Raises ValueError for no drive, or for more drives than heads: a head is never split.
    """
    if drives < 1:
        raise ValueError(f"drives = {drives}: at least 1 is needed")
    if drives > kv_heads:
        raise ValueError(f"drives = {drives}: the model has {kv_heads} KV heads, and a head lives on one drive")
    return _cut(kv_heads, drives)


def share_out(shape: ModelShape, drives: int) -> list[Share]:
    """What each of so many drives has: its KV heads and the queries of those.

    A latent stream that all query heads share is in every drive, and query heads are shared out: attention to it costs
    arithmetic, of which each drive then has a part, and its one row a token is small. Raises ValueError for no drive,
    or for more drives than there are heads to share out.
    """
    if not shape.latent:
        kept = split_heads(shape.kv_heads, drives)
        return [Share(heads, range(heads.start * shape.group, heads.stop * shape.group)) for heads in kept]
    if not 1 <= drives <= shape.q_heads:
        raise ValueError(f"drives = {drives}: must be 1 to {shape.q_heads}, the model's query heads")
    return [Share(range(shape.kv_heads), queries) for queries in _cut(shape.q_heads, drives)]


def _cut(heads: int, drives: int) -> list[range]:
    """Consecutive heads for each drive, as even as they go."""
    cuts = [drive * heads // drives for drive in range(drives + 1)]
    return [range(first, end) for first, end in pairwise(cuts)]
