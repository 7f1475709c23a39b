"""A trace under a policy: iteration by iteration, in modelled time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from kv_cache.tiered.machine import Machine, Tier
from kv_cache.tiered.server import Policy, Server
from kv_cache.tiered.store import Kv, Store
from kv_cache.trace import Request, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What became of a trace. hit_share: of entries of requests that had K and V, those that found them on the device.
    stalled_share: of the time, in which all waited for copies. wait_s: the longest before a slice. stay_tokens: made in
    one stay, in the mean."""

    policy: str
    requests: int
    tokens: int
    seconds: float
    host_bytes: int
    flash_bytes: int
    wasted_bytes: int
    recomputed_tokens: int
    hit_share: float | None
    stalled_share: float
    wait_s: float
    stay_tokens: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def serve(trace: Trace, machine: Machine, policy: Policy, slice_tokens: int) -> Served:
    """All requests to their ends. Raises ValueError for one that a tier cannot hold, and where flash is full."""
    check(trace.requests, machine)
    largest = max(machine.bytes_of(each.tokens + 1) for each in trace.requests)
    server = open_server(machine, policy, slice_tokens, largest)
    coming = deque(trace.requests)
    while coming or server.queue or server.active:
        while coming and coming[0].arrival <= server.store.now_s:
            server.queue.append(waiting(coming[0], machine, coming.popleft().arrival))
        decide(server)
        if server.active:
            _iterate(server)
        elif not server.queue:
            server.store.run_until(coming[0].arrival)
        elif not _wait(server, coming):
            raise RuntimeError("nothing moves")
    return _served(trace, server)


def check(requests: Sequence[Request], machine: Machine) -> None:
    """Raise ValueError for a request that a tier cannot hold."""
    largest = max(requests, key=lambda each: each.tokens)
    size = machine.bytes_of(largest.tokens + 1)
    for tier, room in zip(Tier, machine.rooms(), strict=True):
        if size > room:
            raise ValueError(
                f"request {largest.number}: {size / 1e6:,.2f} MB of K and V, and the tier {tier.name.lower()} has "
                f"{room / 1e6:,.2f} MB: give it more"
            )


def open_server(machine: Machine, policy: Policy, slice_tokens: int, largest_bytes: int) -> Server:
    """A server without requests. largest_bytes: of one of those to come."""
    runs = machine.without_copies() if policy.free else machine
    staged = max(int(policy.staging * machine.device_bytes), largest_bytes) if policy.staging else 0
    limit = max(machine.device_bytes - staged, largest_bytes)
    return Server(runs, policy, slice_tokens, limit, Store(runs), iteration_s=machine.cost.linear_s())


def waiting(request: Request, machine: Machine, since_s: float) -> Kv:
    """A request that has no K and V yet."""
    return Kv(request, machine.bytes_of(request.tokens + 1), request.input_tokens, left_s=since_s)


def decide(server: Server) -> None:
    """Who decodes next, and what is copied meanwhile."""
    server.policy.admit(server)
    server.policy.ahead(server)
    server.policy.admit(server)  # new ones have nothing to copy, and are there as soon as there is room


def _iterate(server: Server) -> None:
    """One token for everyone who decodes, of whom new ones are prefilled first."""
    absent = [kv for kv in server.active if kv.absent]
    for kv in absent:
        kv.absent = False
        server.counts.recomputed_tokens += kv.tokens if kv.uses > 1 else 0
    takes_s = server.machine.iteration_s([kv.tokens for kv in server.active], [kv.tokens for kv in absent])
    server.iterated(takes_s)
    for kv in list(server.active):
        kv.grow()
        if kv.made == kv.request.output_tokens:
            server.withdraw(kv)


def _wait(server: Server, coming: deque[Request]) -> bool:
    """Until a copy or a request comes; False if there is neither."""
    began_s = server.store.now_s
    ends = [move.end_s for move in server.store.running if move.end_s is not None]
    ends += [each.arrival for each in islice(coming, 1)]
    if ends:
        server.store.run_until(min(ends))
    server.counts.stalled_s += server.store.now_s - began_s
    return bool(ends)


def _served(trace: Trace, server: Server) -> Served:
    counts, carried, now_s = server.counts, server.store.carried, server.store.now_s
    tokens = sum(each.output_tokens for each in trace.requests)
    return Served(
        policy=server.policy.name,
        requests=len(trace.requests),
        tokens=tokens,
        seconds=now_s,
        host_bytes=carried[Tier.HOST].bytes,
        flash_bytes=carried[Tier.FLASH].bytes,
        wasted_bytes=counts.wasted_bytes,
        recomputed_tokens=counts.recomputed_tokens,
        hit_share=counts.hits / counts.entries if counts.entries else None,
        stalled_share=counts.stalled_s / now_s,
        wait_s=counts.longest_wait_s,
        stay_tokens=tokens / counts.stays,
    )
