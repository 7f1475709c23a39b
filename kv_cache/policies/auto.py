"""Selection of a policy by the size of the KV cache, with the reason."""

from __future__ import annotations

from kv_cache.hardware import DEVICE, HOST, PAGE_CACHE
from kv_cache.iteration import Iteration
from kv_cache.policies.flexgen import flexgen
from kv_cache.policies.reactive import reactive
from kv_cache.policies.split import split

_MIB = 2**20


def auto(it: Iteration) -> None:
    """Use the highest tier that holds the whole KV cache; chosen again for a larger batch or a changed limit.

    The choice is in `it.memory["chosen"]`, the reason in `it.memory["why"]`.
    """
    total = len(it.layers) * it.layer_bytes(max(it.final_tokens, *it.new.values()))
    total = max(total, it.memory.get("total", 0))
    sizes = total, *map(it.capacity, (DEVICE, HOST, PAGE_CACHE))
    if sizes != it.memory.get("sizes"):
        it.memory["total"], it.memory["sizes"] = total, sizes
        it.memory["chosen"], it.memory["why"] = _choose(it, total)
    match it.memory["chosen"]:
        case "reactive":
            reactive(it)
        case "flexgen-host":
            flexgen(it, home=HOST)
        case "flexgen":
            flexgen(it)
        case _:
            split(it)


def _choose(it: Iteration, total: int) -> tuple[str, str]:
    final = max(it.final_tokens, *it.new.values())
    says = f"the KV cache of {final:,} tokens, {total / _MIB:,.1f} MiB,"
    if total <= it.capacity(DEVICE):
        return "reactive", f"{says} fits on the device"
    if total <= it.capacity(HOST):
        return "flexgen-host", f"{says} fits in host memory, not on the device"
    if total <= it.capacity(PAGE_CACHE):
        return "flexgen", f"{says} fits in the page cache, not in host memory"
    return "split", f"{says} exceeds each tier in memory: it is split between page cache and disk"
