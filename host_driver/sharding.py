"""Which drive owns which KV heads."""

from __future__ import annotations

from itertools import pairwise


def split_heads(kv_heads: int, drives: int) -> list[range]:
    """Consecutive KV heads for each drive, as even as they go; a query group follows its KV head.

    Raises ValueError for no drive, or for more drives than heads: a head is never split.
    """
    if drives < 1:
        raise ValueError(f"drives = {drives}: at least 1 is needed")
    if drives > kv_heads:
        raise ValueError(f"drives = {drives}: the model has {kv_heads} KV heads, and a head lives on one drive")
    cuts = [drive * kv_heads // drives for drive in range(drives + 1)]
    return [range(first, end) for first, end in pairwise(cuts)]
