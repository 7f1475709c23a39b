"""Where a command's modelled time goes: the closed set of units in a completion's breakdown."""

from __future__ import annotations

FLASH_UNITS = ("flash_embed", "flash_table", "flash_token")
"""Waiting for pages: of the embedding-indexed copy of K, of a method's tables, of K and V."""

ENGINE_UNITS = ("argtopk", "logit0", "logit", "attend", "softmax")
"""Approximate logits, exact ones, and the product with V; softmax where it takes longer than its kernel."""

STEP_UNITS = ("network", "link", "queue", "argtopk", *FLASH_UNITS, "logit0", "logit", "attend", "softmax")
"""What a decode step takes, in the order in which a report shows it; network is the way from and
to the host, with a modelled network; queue is waiting for the engine."""

UNITS = (*STEP_UNITS, "flash_program")
"""All of them; flash_program is waiting for programs and erases: of a bulk append for its own, of a read for those on
its lanes."""

MAX_UNIT_BYTES = 16  # of a name, in a completion on its way


def check_unit(unit: str) -> None:
    """Raise ValueError for a unit that there is none of."""
    if unit not in UNITS:
        raise ValueError(f"unit {unit!r}: must be one of {', '.join(UNITS)}")
