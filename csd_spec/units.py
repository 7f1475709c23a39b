"""Units of simulated time: the closed set of names in a completion's latency breakdown."""

from __future__ import annotations

FLASH_UNITS = ("flash_embed", "flash_table", "flash_token")
"""Waiting for pages: embedding-indexed copy of K, tables of a method, and token pages of K and V."""

ENGINE_UNITS = ("argtopk", "logit0", "logit", "attend", "softmax")
"""Approximate logits, exact logits, and the product with V; softmax if it takes longer than its kernel."""

STEP_UNITS = ("network", "link", "queue", "argtopk", *FLASH_UNITS, "logit0", "logit", "attend", "softmax")
"""Parts of a decode step, in the order of reports; network is the transfer to and from the host over a modelled
network, queue is waiting for the engine."""

UNITS = (*STEP_UNITS, "flash_program")
"""All units; flash_program is waiting for programs and erases: a bulk append for its own, a read for those on its
lanes."""

MAX_UNIT_BYTES = 16  # maximum length of a name in an encoded completion


def check_unit(unit: str) -> None:
    """Raise ValueError for an unknown unit."""
    if unit not in UNITS:
        raise ValueError(f"unit {unit!r}: must be one of {', '.join(UNITS)}")
