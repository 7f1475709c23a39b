"""TierAssignment of KV heads and query heads to drives (tensor parallelism)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from csd_spec import ModelShape


@dataclass(frozen=True, slots=True)
class HeadShard:
    """A drive's part of a model: the KV heads that it stores, and the query heads that it computes."""

    kv_heads: range
    q_heads: range

    @property
    def group(self) -> int:
        """Query heads that share a KV head in this drive."""
        return len(self.q_heads) // len(self.kv_heads)


def split_heads(kv_heads: int, drives: int) -> list[range]:
    """Split KV heads into consecutive, even parts; a query group follows its KV head.

    Raises:
        ValueError: `drives` is below 1 or above the number of heads: a head is never split.
    """
    if drives < 1:
        raise ValueError(f"drives = {drives}: must be at least 1")
    if drives > kv_heads:
        raise ValueError(f"drives = {drives}: the model has {kv_heads} KV heads: use at most one drive per head")
    return _cut(kv_heads, drives)


def assign_heads(shape: ModelShape, drives: int) -> list[HeadShard]:
    """Assign KV heads and query heads to drives.

    KV heads are split evenly and contiguously; a query group follows its KV head. A latent stream (MLA) is replicated
    on every drive and its query heads are split, because one row per token is small and arithmetic dominates.

    Raises:
        ValueError: `drives` is below 1 or above the number of heads that can be split.
    """
    if not shape.latent:
        head_ranges = split_heads(shape.kv_heads, drives)
        return [HeadShard(heads, range(heads.start * shape.group, heads.stop * shape.group)) for heads in head_ranges]
    if not 1 <= drives <= shape.q_heads:
        raise ValueError(f"drives = {drives}: must be 1 to {shape.q_heads}, the model's query heads")
    return [HeadShard(range(shape.kv_heads), queries) for queries in _cut(shape.q_heads, drives)]


def _cut(heads: int, drives: int) -> list[range]:
    """Split heads into consecutive, even parts."""
    cuts = [drive * heads // drives for drive in range(drives + 1)]
    return [range(first, end) for first, end in pairwise(cuts)]
