"""A machine whose tokens are 1,000 bytes, and requests for it."""

import random
from dataclasses import replace

from kv_cache.cost import CostModel, ServingCost
from kv_cache.engine import Engine
from kv_cache.policies import policy_of
from kv_cache.policies.time_slices import TimeSlices
from kv_cache.request import SequenceState
from kv_cache.trace import Request, Trace
from kv_cache.transfer.sequences import Kv, Levels, SequenceStore

COST = {"step_s": 1e-2, "kv_bytes_per_s": 1e9, "prefill_tokens_per_s": 1e4}


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
    }
    values |= more
    return Levels(**{name: value for name, value in values.items() if name not in COST})


def cost(**more):
    """Its compute: a step of 10 ms, and 1 us for each stored token."""
    values = {name: more.get(name, value) for name, value in COST.items()}
    compute = CostModel.fitted(
        layers=4,
        step_s=values["step_s"],
        token_s=1000 / values["kv_bytes_per_s"],
        prefill_tokens_per_s=values["prefill_tokens_per_s"],
    )
    return ServingCost(name="small", compute=compute, fetch_s=0.0, fetch_token_s=0.0, room_blocks=1 << 40)


def served(given, levels, name, slice_tokens, policy=None, **more):
    """All requests of a trace under a policy: the policy, and what became of them."""
    policy = policy or policy_of(name)
    policy.slice_tokens = slice_tokens
    at = levels.with_instant_copies() if policy.free else levels
    longest = max(request.tokens + 1 for request in given.requests)
    for request in given.requests:
        levels.check(request.tokens + 1, request.number)
    store = SequenceStore(replace(at, longest_tokens=longest))
    return policy, Engine(policy, cost(**more), trace=given, store=store).run()


def waiting(name, count, level, **more):
    """A policy with sequences of 20 tokens in a tier, all of which wait."""
    levels = machine(**more)
    policy = policy_of(name)
    assert isinstance(policy, TimeSlices)
    policy.slice_tokens, policy.store, policy.cost = 5, SequenceStore(levels), cost(**more)
    policy.limit, policy.iteration_s, policy._levels = levels.device_bytes, 0.01, levels
    for request in trace([(15, 5)] * count).requests:
        kv = stored(policy.store, request, levels.bytes_of(20), level)
        policy.queue.append(kv)
        policy._kvs[request.number] = kv
    return policy


def stored(store, request, room, level=None):
    """The KV cache of a request, in a tier or nowhere."""
    computed = request.input_tokens if level is not None else 0
    kv = Kv(SequenceState(request, 0.0, num_computed_tokens=computed), room, level)
    if level is not None:
        store.free[level] -= store.size(kv, level)
    return kv


def trace(lengths, gap_s=0.0):
    """Requests of (input, output) tokens."""
    requests = [
        Request(number=number, arrival=number * gap_s, input_tokens=prompt, output_tokens=wanted)
        for number, (prompt, wanted) in enumerate(lengths)
    ]
    return Trace(name="small", requests=requests)


def drawn(seed):
    """A random machine, requests and slice."""
    draw = random.Random(seed)
    count, most = draw.randint(1, 30), draw.choice([50, 400])
    requests = trace([(draw.randint(1, most), draw.randint(1, 60)) for _ in range(count)], draw.choice([0, 0.01, 0.3]))
    largest = max(machine().bytes_of(request.tokens + 1) for request in requests.requests)
    at = machine(
        device_bytes=int(largest * draw.choice([1, 1.2, 2, 3, 6])),
        host_bytes=int(largest * draw.choice([1, 1.3, 2, 4, 20])),
        host_bytes_per_s=10 ** draw.uniform(6, 9),
        flash_bytes_per_s=10 ** draw.uniform(5.5, 8),
    )
    per_s = 10 ** draw.uniform(3, 6)
    return at, requests, draw.choice([1, 5, 20, 100]), per_s
