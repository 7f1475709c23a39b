"""The policy that suits what there is to keep, with the reason."""

from __future__ import annotations

from residency.machine import DEVICE, HOST, PAGE_CACHE
from residency.policies.flexgen import flexgen
from residency.policies.reactive import reactive
from residency.policies.split import split
from residency.turn import Turn

_MIB = 2**20


def auto(t: Turn) -> None:
    """Whatever fits the highest tiers moves least; chosen once more where a batch is larger than those before it.

    The choice and why are in the memory, "chosen" and "why".
    """
    total = len(t.layers) * t.layer_bytes(max(t.final_tokens, *t.new.values()))
    if total > t.memory.get("total", -1):
        t.memory["total"] = total
        t.memory["chosen"], t.memory["why"] = _choose(t, total)
    match t.memory["chosen"]:
        case "reactive":
            reactive(t)
        case "flexgen-host":
            flexgen(t, home=HOST)
        case "flexgen":
            flexgen(t)
        case _:
            split(t)


def _choose(t: Turn, total: int) -> tuple[str, str]:
    final = max(t.final_tokens, *t.new.values())
    says = f"K and V of {final:,} tokens, {total / _MIB:,.1f} MiB,"
    if total <= t.capacity(DEVICE):
        return "reactive", f"{says} fit the device"
    if total <= t.capacity(HOST):
        return "flexgen-host", f"{says} fit host memory, not the device"
    if total <= t.capacity(PAGE_CACHE):
        return "flexgen", f"{says} fit the page cache, not host memory"
    return "split", f"{says} are more than any tier in memory keeps: they are split over page cache and disk"
