"""Requests on hosts with drives: arrivals, prefills, decode steps of a batch, completions. Compiled.

A host prefills a waiting request if a group of its drives has a free slot, and decodes a step of the whole batch before
the next prefill: neither waits for the other for long. A decode step takes the GPU's time, the link's, the network's,
and that of the slowest group, one after the other. Time goes on step by step, since a step is a sum over the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from csd_io.compiled import njit
from csd_spec.arrays import F64, I64

RESOURCES = ("idle", "gpu", "link", "network", "drives", "stragglers", "kv_heads")
IDLE, GPU, LINK, NETWORK, DRIVES, STRAGGLERS, KV_HEADS = range(len(RESOURCES))


class Requests(NamedTuple):
    """Requests in order of arrival, (R,) each.

    prefill_s: Seconds of the prefill with its writes to the drives. prefill_bound: The resource that takes them.
    """

    arrival_s: F64
    input_tokens: I64
    output_tokens: I64
    prefill_s: F64
    prefill_bound: I64


class Costs(NamedTuple):
    """Seconds of a decode step.

    by_batch: Of GPU, link and network by sequences of a host, (batch + 1, 3).
    drive: Of a mean drive: fixed; for each token so far, flash and engine; for each token of one sequence, (4,).
    slowest: Of the drives of a group over their mean.
    """

    by_batch: F64
    drive: F64
    slowest: float


class _State(NamedTuple):
    """Hosts at work. Slots are (hosts, groups, slots), in order of admission."""

    now_s: F64
    spent_s: F64  # by resource, (hosts, resources)
    load: I64  # prompt tokens of requests that have not ended
    is_decoded: I64  # 0 after a prefill, until a step
    members: I64  # sequences of a group, (hosts, groups)
    tokens: I64
    left: I64
    request: I64
    queue: I64  # first and last that wait, (hosts, 2); -1 is none
    after: I64  # the request that follows in the queue, (R,)
    first_s: F64  # when a request has its first token, and its last, (R,); NaN before
    end_s: F64
    made: I64  # tokens, (hosts,)


@dataclass(frozen=True, slots=True)
class Served:
    """What came of the requests. spent_s: by resource, (hosts, resources). made: tokens by host."""

    first_s: F64
    end_s: F64
    spent_s: F64
    made: I64
    stored: I64  # tokens made by requests that have not ended, by host


@njit(cache=True, nogil=True)
def _free_group(s: Any, host: int) -> int:
    """The group with a free slot that has the fewest tokens; -1 if there is none."""
    best, fewest = -1, 0
    for group in range(s.members.shape[1]):
        n = s.members[host, group]
        if n < s.tokens.shape[2]:
            total = s.tokens[host, group, :n].sum()
            if best < 0 or total < fewest:
                best, fewest = group, total
    return best


@njit(cache=True, nogil=True)
def _prefill(s: Any, requests: Any, host: int, group: int) -> None:
    """Admit the first request of the queue."""
    r = s.queue[host, 0]
    s.queue[host, 0] = s.after[r]
    s.now_s[host] += requests.prefill_s[r]
    s.spent_s[host, requests.prefill_bound[r]] += requests.prefill_s[r]
    s.first_s[r] = s.now_s[host]
    s.made[host] += 1
    if requests.output_tokens[r] == 1:
        s.end_s[r] = s.now_s[host]
        s.load[host] -= requests.input_tokens[r]
        return
    n = s.members[host, group]
    s.tokens[host, group, n] = requests.input_tokens[r]
    s.left[host, group, n] = requests.output_tokens[r] - 1
    s.request[host, group, n] = r
    s.members[host, group] = n + 1


@njit(cache=True, nogil=True)
def _retire(s: Any, requests: Any, host: int, group: int) -> None:
    """Take out what has ended; the others stay in order."""
    kept = 0
    for at in range(s.members[host, group]):
        r = s.request[host, group, at]
        if s.left[host, group, at] == 0:
            s.end_s[r] = s.now_s[host]
            s.load[host] -= requests.input_tokens[r]
        else:
            s.tokens[host, group, kept] = s.tokens[host, group, at]
            s.left[host, group, kept] = s.left[host, group, at]
            s.request[host, group, kept] = r
            kept += 1
    s.members[host, group] = kept


@njit(cache=True, nogil=True)
def _group_s(s: Any, costs: Any, host: int, group: int) -> tuple[float, bool]:
    """Seconds of a group's mean drive for a step, and whether a request ends with it; each gets a token."""
    fixed_s, flash_s, engine_s, tail_s = costs.drive
    so_far, chain_s, ends = 0, 0.0, False
    for at in range(s.members[host, group]):
        tokens = s.tokens[host, group, at]
        so_far += tokens
        chain_s = max(chain_s, so_far * flash_s + tokens * tail_s)
        s.tokens[host, group, at] = tokens + 1
        s.left[host, group, at] -= 1
        ends |= s.left[host, group, at] == 0
    return fixed_s + max(chain_s, so_far * engine_s), ends


@njit(cache=True, nogil=True)
def _decode(s: Any, requests: Any, costs: Any, host: int) -> None:
    """One step of all sequences of a host."""
    groups = s.members.shape[1]
    batch, sum_s, worst_s, ends = s.members[host].sum(), 0.0, 0.0, False
    for group in range(groups):
        if s.members[host, group]:
            group_s, over = _group_s(s, costs, host, group)
            sum_s, worst_s, ends = sum_s + group_s, max(worst_s, group_s), ends or over
    spent = s.spent_s[host]
    for at in range(3):
        spent[GPU + at] += costs.by_batch[batch, at]
    spent[DRIVES] += sum_s / groups
    spent[KV_HEADS] += worst_s - sum_s / groups
    spent[STRAGGLERS] += (costs.slowest - 1) * worst_s
    s.now_s[host] += costs.by_batch[batch].sum() + costs.slowest * worst_s
    s.made[host] += batch
    if ends:
        for group in range(groups):
            _retire(s, requests, host, group)


@njit(cache=True, nogil=True)
def _advance(s: Any, requests: Any, costs: Any, host: int, until_s: float) -> None:
    """Let a host work until the first step that ends at `until_s` or later."""
    while s.now_s[host] < until_s:
        is_working = s.members[host].sum() > 0
        may_admit = s.queue[host, 0] >= 0 and (s.is_decoded[host] or not is_working)
        group = _free_group(s, host) if may_admit else -1
        if group >= 0:
            _prefill(s, requests, host, group)
            s.is_decoded[host] = 0
        elif is_working:
            _decode(s, requests, costs, host)
            s.is_decoded[host] = 1
        else:
            s.spent_s[host, IDLE] += until_s - s.now_s[host]
            s.now_s[host] = until_s


@njit(cache=True, nogil=True)
def _run(s: Any, requests: Any, costs: Any, horizon_s: float) -> None:
    """Requests go to the host with the fewest prompt tokens that are not done with."""
    for r in range(requests.arrival_s.size):
        if requests.arrival_s[r] >= horizon_s:
            break
        for host in range(s.now_s.size):
            _advance(s, requests, costs, host, requests.arrival_s[r])
        host = int(np.argmin(s.load))
        s.load[host] += requests.input_tokens[r]
        if s.queue[host, 0] < 0:
            s.queue[host, 0] = r
        else:
            s.after[s.queue[host, 1]] = r
        s.queue[host, 1] = r
    for host in range(s.now_s.size):
        _advance(s, requests, costs, host, horizon_s)


def serve(requests: Requests, costs: Costs, hosts: int, groups: int, slots: int, horizon_s: float) -> Served:
    """Run the hosts until the horizon.

    Args:
        requests: In order of arrival.
        costs: Of a decode step.
        hosts: Number of hosts, each with one GPU.
        groups: Groups of drives of a host; each sequence is on one group.
        slots: Sequences that a group holds.
        horizon_s: End.
    """
    R, slots_of = requests.arrival_s.size, (hosts, groups, slots)
    s = _State(
        now_s=np.zeros(hosts),
        spent_s=np.zeros((hosts, len(RESOURCES))),
        load=np.zeros(hosts, np.int64),
        is_decoded=np.ones(hosts, np.int64),
        members=np.zeros((hosts, groups), np.int64),
        tokens=np.zeros(slots_of, np.int64),
        left=np.zeros(slots_of, np.int64),
        request=np.zeros(slots_of, np.int64),
        queue=np.full((hosts, 2), -1, np.int64),
        after=np.full(R, -1, np.int64),
        first_s=np.full(R, np.nan),
        end_s=np.full(R, np.nan),
        made=np.zeros(hosts, np.int64),
    )
    _run(s, requests, costs, horizon_s)
    at_work = np.arange(slots) < s.members[:, :, None]
    stored = (requests.output_tokens[s.request] - s.left) * at_work
    return Served(s.first_s, s.end_s, s.spent_s, s.made, stored.sum(axis=(1, 2)))
