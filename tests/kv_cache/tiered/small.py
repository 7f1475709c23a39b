"""A machine whose tokens are 1,000 bytes, and requests for it."""

import random

from kv_cache.cost import CostModel
from kv_cache.tiered.machine import Machine
from kv_cache.trace import Request, Trace


def machine(**more):
    """100 tokens on the device, in blocks of 10; a copy of 10 tokens takes 1 ms, and from flash 10 ms."""
    values = {
        "token_bytes": 1000,
        "block_tokens": 10,
        "device_bytes": 100_000,
        "host_bytes": 100_000,
        "flash_bytes": 10**9,
        "host_bytes_per_s": 1e7,
        "flash_bytes_per_s": 1e6,
        "step_s": 1e-2,
        "kv_bytes_per_s": 1e9,
        "prefill_tokens_per_s": 1e4,
    }
    values |= more
    step_s, kv_bytes_per_s, per_s = (values.pop(name) for name in ("step_s", "kv_bytes_per_s", "prefill_tokens_per_s"))
    cost = CostModel.fitted(
        layers=4, step_s=step_s, token_s=values["token_bytes"] / kv_bytes_per_s, prefill_tokens_per_s=per_s
    )
    return Machine(cost=cost, **values)


def trace(lengths, gap_s=0.0):
    """Requests of (input, output) tokens."""
    made = [
        Request(number=number, arrival=number * gap_s, input_tokens=given, output_tokens=wanted)
        for number, (given, wanted) in enumerate(lengths)
    ]
    return Trace(name="small", requests=made)


def drawn(seed):
    """A random machine, requests and slice."""
    draw = random.Random(seed)
    count, most = draw.randint(1, 30), draw.choice([50, 400])
    requests = trace([(draw.randint(1, most), draw.randint(1, 60)) for _ in range(count)], draw.choice([0, 0.01, 0.3]))
    largest = max(machine().bytes_of(each.tokens + 1) for each in requests.requests)
    at = machine(
        device_bytes=int(largest * draw.choice([1, 1.2, 2, 3, 6])),
        host_bytes=int(largest * draw.choice([1, 1.3, 2, 4, 20])),
        host_bytes_per_s=10 ** draw.uniform(6, 9),
        flash_bytes_per_s=10 ** draw.uniform(5.5, 8),
        prefill_tokens_per_s=10 ** draw.uniform(3, 6),
    )
    return at, requests, draw.choice([1, 5, 20, 100])
