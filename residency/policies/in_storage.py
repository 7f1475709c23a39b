"""Attention in the drives that hold KV, as in InstInfer: nothing moves but q, k, v and the output."""

from __future__ import annotations

from residency.machine import CSD
from residency.turn import Turn


def in_storage(t: Turn, method: str = "dense") -> None:
    """Attend where KV lies."""
    for layer in t.layers:
        t.attend(layer, at=CSD, method=method)
