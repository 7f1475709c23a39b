"""Requests on hosts with drives: arrivals, prefills, decode steps of a batch, completions. Compiled.

A host prefills a waiting request if a group of its drives has a free slot, and decodes a step of the whole batch before
the next prefill: neither waits for the other for long. A decode step takes the GPU's time, the link's, the network's,
and that of the slowest group, one after the other, or in two half batches that take turns. Simulated time advances step
by step, since a step is a sum over the batch.

`vcsd_eval.fleet.simulation` owns these arrays. Latencies are counted in histograms, so memory does not grow with time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from csd_io.compiled import njit
from csd_spec.arrays import F64, I64, U64

RESOURCES = ("idle", "gpu", "link", "network", "drives", "stragglers", "kv_heads")
IDLE, GPU, LINK, NETWORK, DRIVES, STRAGGLERS, KV_HEADS = range(len(RESOURCES))

NO_PREFIXES, LOCAL, COPIED = range(3)
"""Prefixes are not reused; reused in the group of drives that stores them; also copied to another group."""

LEAST_S, BUCKETS_OF_E = 1e-6, 256  # histogram: the lowest latency, and buckets in which it grows e times
BUCKETS = int(np.log(1e12) * BUCKETS_OF_E)
TTFT, TPOT = range(2)


class DriveStep(NamedTuple):
    """Seconds of a decode step of a mean drive.

    Attributes:
        part_s: Per part of a batch.
        flash_s, engine_s: Flash and engine, per token of the sequences so far.
        tail_s: Per token of one sequence.
    """

    part_s: float
    flash_s: float
    engine_s: float
    tail_s: float


class ArrivalColumns(NamedTuple):
    """Requests that arrive in a period.

    Attributes:
        arrival_s: Arrival, seconds, (R,).
        input_tokens, output_tokens: Tokens of prompt and answer, (R,).
        block_ends: End of the blocks of each prompt, (R,).
    """

    arrival_s: F64
    input_tokens: I64
    output_tokens: I64
    block_ends: I64


class Costs(NamedTuple):
    """Seconds of a host's work.

    Attributes:
        by_batch: GPU, link and network of a decode step by sequences of a host, (batch + 1, 3).
        drive: A decode step of a mean drive.
        slowest: Slowest drive of a group over their mean.
        micro_batches: Parts of a batch; two alternate between the GPU and the drives.
        layers: Layers of the model.
        prefill_grid: Tokens between the rows of the next two.
        new_s: GPU time by new prompt tokens without their attention, (N,).
        seen_s: GPU time of a prompt's attention by its tokens, (N,).
        write_s, read_s, copy_s: Network and drives, (2,) each: seconds per token to write KV data, to read it for the
            GPU, and to copy it from another group.
        prefixes: NO_PREFIXES, LOCAL or COPIED.
    """

    by_batch: F64
    drive: DriveStep
    slowest: float
    micro_batches: int
    layers: int
    prefill_grid: int
    new_s: F64
    seen_s: F64
    write_s: F64
    read_s: F64
    copy_s: F64
    prefixes: int


class Pool(NamedTuple):
    """Requests that wait for a slot, (P,) each. after: the next entry of a queue, or of the free entries; -1: none."""

    arrival_s: F64
    input_tokens: I64
    output_tokens: I64
    first_block: I64  # in `Prefixes.blocks`
    block_count: I64  # 0: none are known
    after: I64


class Prefixes(NamedTuple):
    """Where blocks of prompts are stored. Those of this period and of the period before are known.

    Attributes:
        blocks: Numbers of blocks, (2 * B,): the rows of `holders`.
        holders: Bit g of word w: group 64 w + g stores the block, (blocks, words).
    """

    blocks: I64
    holders: U64


class State(NamedTuple):
    """Hosts at work. Slots are (hosts, groups, slots), in order of admission."""

    now_s: F64
    spent_s: F64  # by resource, (hosts, resources)
    load: I64  # prompt tokens of requests that have not ended
    is_decoded: I64  # 0 after a prefill, until a step
    members: I64  # sequences of a group, (hosts, groups)
    tokens: I64
    left: I64
    prompt: I64
    output: I64
    first_s: F64  # when a request had its first token
    queue: I64  # first and last entry of the pool that waits, (hosts, 2); -1: empty
    free: I64  # first free entry of the pool, and their number, (2,)
    latencies: I64  # histograms of TTFT and TPOT, (2, buckets)
    made: I64  # tokens, (hosts,)
    ended: I64  # requests, (hosts,)
    prompted: I64  # prompt tokens of admitted requests; reused of them; copied of those, (hosts, 3)


@njit(cache=True, nogil=True)
def _count(s: Any, which: int, seconds: float) -> None:
    """Add a latency to its histogram."""
    bucket = int(np.log(max(seconds, LEAST_S) / LEAST_S) * BUCKETS_OF_E)
    s.latencies[which, min(bucket, s.latencies.shape[1] - 1)] += 1


@njit(cache=True, nogil=True)
def _stored_blocks(pool: Any, prefixes: Any, entry: int, group: int) -> int:
    """Leading blocks of a waiting request's prompt that a group stores; of all groups together if `group` is -1."""
    word, bit = group // 64, np.uint64(1) << np.uint64(group % 64)
    for at in range(pool.block_count[entry]):
        holders = prefixes.holders[prefixes.blocks[pool.first_block[entry] + at]]
        if not (holders.any() if group < 0 else holders[word] & bit):
            return at
    return int(pool.block_count[entry])


@njit(cache=True, nogil=True)
def _free_group(s: Any, pool: Any, prefixes: Any, host: int, entry: int) -> tuple[int, int]:
    """The group with a free slot that stores most of a prompt, and of equals the one with the fewest tokens.

    Returns:
        Its number in the host (-1: no slot is free), and the blocks of the prompt that it stores.
    """
    best, fewest, most = -1, 0, 0
    groups = s.members.shape[1]
    for group in range(groups):
        n = s.members[host, group]
        if n < s.tokens.shape[2]:
            total = s.tokens[host, group, :n].sum()
            stored = _stored_blocks(pool, prefixes, entry, host * groups + group)
            if best < 0 or stored > most or (stored == most and total < fewest):
                best, fewest, most = group, total, stored
    return best, most


@njit(cache=True, nogil=True)
def _at(table: Any, grid: int, tokens: int) -> float:
    """Value of a table with a row for every `grid` tokens, between rows by a line."""
    row, rest = tokens // grid, tokens % grid
    return float(table[row] + (table[row + 1] - table[row]) * rest / grid)


@njit(cache=True, nogil=True)
def _prefill(s: Any, pool: Any, prefixes: Any, costs: Any, host: int, group: int, stored: int, block: int) -> None:
    """Admit the first request of a host's queue to a group that stores some blocks of its prompt."""
    entry = s.queue[host, 0]
    s.queue[host, 0] = pool.after[entry]
    prompt, output, blocks = pool.input_tokens[entry], pool.output_tokens[entry], pool.block_count[entry]
    held = max(stored, _stored_blocks(pool, prefixes, entry, -1)) if costs.prefixes == COPIED else stored
    reused, copied = held * block, (held - stored) * block
    gpu_s = _at(costs.new_s, costs.prefill_grid, prompt - reused)
    gpu_s += _at(costs.seen_s, costs.prefill_grid, prompt) - _at(costs.seen_s, costs.prefill_grid, reused)
    best_s, bound = gpu_s, GPU
    for at, resource in enumerate((NETWORK, DRIVES)):
        seconds = (prompt - reused) * costs.write_s[at] + copied * costs.copy_s[at]
        seconds = max(seconds, reused * costs.read_s[at])
        if seconds > best_s:
            best_s, bound = seconds, resource
    s.now_s[host] += best_s
    s.spent_s[host, bound] += best_s
    if costs.prefixes != NO_PREFIXES:
        number = host * s.members.shape[1] + group
        for at in range(blocks):
            row = prefixes.blocks[pool.first_block[entry] + at]
            prefixes.holders[row, number // 64] |= np.uint64(1) << np.uint64(number % 64)
    s.prompted[host] += np.array([prompt, reused, copied])
    s.made[host] += 1
    _count(s, TTFT, s.now_s[host] - pool.arrival_s[entry])
    pool.after[entry] = s.free[0]
    s.free[0], s.free[1] = entry, s.free[1] + 1
    if output == 1:
        s.load[host] -= prompt
        s.ended[host] += 1
        return
    n = s.members[host, group]
    s.tokens[host, group, n] = prompt
    s.left[host, group, n] = output - 1
    s.prompt[host, group, n] = prompt
    s.output[host, group, n] = output
    s.first_s[host, group, n] = s.now_s[host]
    s.members[host, group] = n + 1


@njit(cache=True, nogil=True)
def _retire(s: Any, host: int, group: int) -> None:
    """Remove finished requests; the others stay in order."""
    running = 0
    for at in range(s.members[host, group]):
        if s.left[host, group, at] == 0:
            _count(s, TPOT, (s.now_s[host] - s.first_s[host, group, at]) / (s.output[host, group, at] - 1))
            s.load[host] -= s.prompt[host, group, at]
            s.ended[host] += 1
        else:
            s.tokens[host, group, running] = s.tokens[host, group, at]
            s.left[host, group, running] = s.left[host, group, at]
            s.prompt[host, group, running] = s.prompt[host, group, at]
            s.output[host, group, running] = s.output[host, group, at]
            s.first_s[host, group, running] = s.first_s[host, group, at]
            running += 1
    s.members[host, group] = running


@njit(cache=True, nogil=True)
def _group_s(s: Any, costs: Any, host: int, group: int) -> tuple[float, bool]:
    """Seconds of a group's mean drive for a step, and whether a request ends with it; each gets a token."""
    drive = costs.drive
    so_far, chain_s, ends = 0, 0.0, False
    for at in range(s.members[host, group]):
        tokens = s.tokens[host, group, at]
        so_far += tokens
        chain_s = max(chain_s, so_far * drive.flash_s + tokens * drive.tail_s)
        s.tokens[host, group, at] = tokens + 1
        s.left[host, group, at] -= 1
        ends |= s.left[host, group, at] == 0
    parts = min(costs.micro_batches, s.members[host, group])
    return parts * drive.part_s + max(chain_s, so_far * drive.engine_s), ends


@njit(cache=True, nogil=True)
def _decode(s: Any, costs: Any, host: int) -> None:
    """One step of all sequences of a host."""
    groups = s.members.shape[1]
    batch, sum_s, worst_s, ends = s.members[host].sum(), 0.0, 0.0, False
    for group in range(groups):
        if s.members[host, group]:
            group_s, over = _group_s(s, costs, host, group)
            sum_s, worst_s, ends = sum_s + group_s, max(worst_s, group_s), ends or over
    gpu_s, link_s, network_s = costs.by_batch[batch]
    rest_s = link_s + network_s + costs.slowest * worst_s
    parts = min(costs.micro_batches, batch)
    shorter = 1.0 if parts == 1 else 1 / (parts * costs.layers)  # its first part only: the longer stage hides the rest
    gpu_part, rest_part = (shorter, 1.0) if gpu_s < rest_s else (1.0, shorter)
    spent = s.spent_s[host]
    spent[GPU] += gpu_part * gpu_s
    spent[LINK] += rest_part * link_s
    spent[NETWORK] += rest_part * network_s
    spent[DRIVES] += rest_part * sum_s / groups
    spent[KV_HEADS] += rest_part * (worst_s - sum_s / groups)
    spent[STRAGGLERS] += rest_part * (costs.slowest - 1) * worst_s
    s.now_s[host] += gpu_part * gpu_s + rest_part * rest_s
    s.made[host] += batch
    if ends:
        for group in range(groups):
            _retire(s, host, group)


@njit(cache=True, nogil=True)
def _advance(s: Any, pool: Any, prefixes: Any, costs: Any, host: int, block: int, until_s: float) -> None:
    """Advance a host to the first step that ends at `until_s` or later."""
    while s.now_s[host] < until_s:
        is_working, group, stored = s.members[host].sum() > 0, -1, 0
        if s.queue[host, 0] >= 0 and (s.is_decoded[host] or not is_working):
            group, stored = _free_group(s, pool, prefixes, host, s.queue[host, 0])
        if group >= 0:
            _prefill(s, pool, prefixes, costs, host, group, stored, block)
            s.is_decoded[host] = 0
        elif is_working:
            _decode(s, costs, host)
            s.is_decoded[host] = 1
        else:
            s.spent_s[host, IDLE] += until_s - s.now_s[host]
            s.now_s[host] = until_s


@njit(cache=True, nogil=True)
def _host_of(s: Any, pool: Any, prefixes: Any, costs: Any, entry: int, block: int) -> int:
    """The host with the fewest prompt tokens in progress, with those that it would have to compute for a request."""
    if costs.prefixes == NO_PREFIXES:
        return int(np.argmin(s.load))
    best, fewest = 0, -1
    groups = s.members.shape[1]
    for host in range(s.now_s.size):
        most = 0
        for group in range(groups):
            most = max(most, _stored_blocks(pool, prefixes, entry, host * groups + group))
        total = s.load[host] + pool.input_tokens[entry] - most * block
        if fewest < 0 or total < fewest:
            best, fewest = host, total
    return best


@njit(cache=True, nogil=True)
def run(s: Any, pool: Any, prefixes: Any, costs: Any, arrivals: Any, first_block: int, block: int) -> None:
    """Requests of a period arrive; each goes to a host and waits there.

    Args:
        arrivals: `ArrivalColumns` of the period.
        first_block: Index of the period's first block in `prefixes.blocks`.
        block: Tokens of a block.
    """
    for r in range(arrivals.arrival_s.size):
        for host in range(s.now_s.size):
            _advance(s, pool, prefixes, costs, host, block, arrivals.arrival_s[r])
        entry = s.free[0]
        s.free[0], s.free[1] = pool.after[entry], s.free[1] - 1
        start, end = arrivals.block_ends[r - 1] if r else 0, arrivals.block_ends[r]
        pool.arrival_s[entry], pool.after[entry] = arrivals.arrival_s[r], -1
        pool.input_tokens[entry], pool.output_tokens[entry] = arrivals.input_tokens[r], arrivals.output_tokens[r]
        pool.first_block[entry], pool.block_count[entry] = first_block + start, end - start
        host = _host_of(s, pool, prefixes, costs, entry, block)
        s.load[host] += arrivals.input_tokens[r]
        if s.queue[host, 0] < 0:
            s.queue[host, 0] = entry
        else:
            pool.after[s.queue[host, 1]] = entry
        s.queue[host, 1] = entry


@njit(cache=True, nogil=True)
def finish(s: Any, pool: Any, prefixes: Any, costs: Any, block: int, horizon_s: float) -> None:
    """Advance all hosts to the end."""
    for host in range(s.now_s.size):
        _advance(s, pool, prefixes, costs, host, block, horizon_s)
