"""Attention in the drives that hold KV, as in InstInfer: nothing moves but q, k, v and the output."""

from __future__ import annotations

from kv_cache.hardware import CSD
from kv_cache.iteration import Iteration


def in_storage(it: Iteration, method: str = "dense") -> None:
    """Attend where KV lies."""
    for layer in it.layers:
        it.attend(layer, at=CSD, method=method)
