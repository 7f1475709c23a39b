"""Run hosts under arrivals, period by period; `serve` is the entry point. Memory is that of two periods.

partner of: eval/fleet/events.py
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from csd_spec.arrays import F64, I64
from vcsd_eval.fleet.events import (
    BUCKETS,
    BUCKETS_OF_E,
    LEAST_S,
    RESOURCES,
    ArrivalColumns,
    Costs,
    Pool,
    Prefixes,
    State,
    finish,
    run,
)  # fmt: skip
from vcsd_eval.fleet.workload import Arrivals


@dataclass(frozen=True, slots=True)
class Served:
    """Result of a run.

    Attributes:
        spent_s: Time by resource, (hosts, resources).
        made: Tokens made, (hosts,).
        ended: Requests that ended, (hosts,).
        stored: Tokens made by requests that have not ended, (hosts,).
        arrived: Number of requests.
        input_tokens, reused_tokens, copied_tokens: Prompt tokens of admitted requests; those that were not computed;
            those of them that came from another group.
        latencies: Histograms of TTFT and TPOT, (2, buckets).
    """

    spent_s: F64
    made: I64
    ended: I64
    stored: I64
    arrived: int
    input_tokens: int
    reused_tokens: int
    copied_tokens: int
    latencies: I64

    def percentile_s(self, which: int, percent: float) -> float | None:
        """Percentile of TTFT or TPOT, within 0.2 %; None without requests."""
        until = np.cumsum(self.latencies[which])
        if not until[-1]:
            return None
        bucket = int(np.searchsorted(until, max(1.0, until[-1] * percent / 100)))
        return float(LEAST_S * np.exp((bucket + 0.5) / BUCKETS_OF_E))


class _Simulation:
    """Hosts at work, requests that wait, and the prompts' blocks of this period and of the one before."""

    def __init__(self, costs: Costs, hosts: int, groups: int, slots: int) -> None:
        shape, none = (hosts, groups, slots), np.zeros(0, np.int64)
        self.costs, self.arrived, self.block_tokens = costs, 0, 1
        self.state = State(
            now_s=np.zeros(hosts),
            spent_s=np.zeros((hosts, len(RESOURCES))),
            load=np.zeros(hosts, np.int64),
            is_decoded=np.ones(hosts, np.int64),
            members=np.zeros((hosts, groups), np.int64),
            tokens=np.zeros(shape, np.int64),
            left=np.zeros(shape, np.int64),
            prompt=np.zeros(shape, np.int64),
            output=np.zeros(shape, np.int64),
            first_s=np.zeros(shape),
            queue=np.full((hosts, 2), -1, np.int64),
            free=np.array([-1, 0]),
            latencies=np.zeros((2, BUCKETS), np.int64),
            made=np.zeros(hosts, np.int64),
            ended=np.zeros(hosts, np.int64),
            prompted=np.zeros((hosts, 3), np.int64),
        )
        self.pool = Pool(np.zeros(0), none, none, none, none, none)
        self.prefixes = Prefixes(none, np.zeros((0, -(-hosts * groups // 64)), np.uint64))
        self.before = (0, 0)  # blocks, and own rows, of the period before the last

    def arrive(self, arrivals: Arrivals) -> None:
        """Run the hosts through the arrivals of a period."""
        self._make_room(arrivals.arrival_s.size)
        first = self._learn(arrivals)
        columns = ArrivalColumns(arrivals.arrival_s, arrivals.input_tokens, arrivals.output_tokens, arrivals.block_ends)
        run(self.state, self.pool, self.prefixes, self.costs, columns, first, arrivals.block_tokens)
        self.arrived, self.block_tokens = self.arrived + arrivals.arrival_s.size, arrivals.block_tokens

    def _make_room(self, count: int) -> None:
        """Make free entries in the pool."""
        size, free = self.pool.after.size, self.state.free
        more = count - int(free[1])
        if more > 0:
            after = np.append(np.arange(size + 1, size + more), free[0])
            grown = {
                name: np.append(column, np.zeros(more, column.dtype)) for name, column in self.pool._asdict().items()
            }
            self.pool = Pool(**grown | {"after": np.append(self.pool.after, after)})
            free[:] = size, count

    def _learn(self, arrivals: Arrivals) -> int:
        """Add the blocks of a period, and forget those of the period before the last. Returns where they begin."""
        (blocks, rows), shared, pool = self.before, arrivals.shared, self.pool
        pool.block_count[pool.first_block < blocks] = 0
        pool.first_block[:] = np.maximum(0, pool.first_block - blocks)
        old = self.prefixes.blocks[blocks:]
        old = np.where(old < shared, old, old - rows)
        holders = self.prefixes.holders
        others = np.concatenate([holders[:shared], holders[shared + rows :]])
        own = arrivals.distinct_blocks - shared
        missing = shared - len(others[:shared])  # before the first period there are none
        added = np.zeros((own + missing, holders.shape[1]), np.uint64)
        last = len(others) + missing - shared  # own rows of the last period
        new = np.where(arrivals.blocks < shared, arrivals.blocks, arrivals.blocks + last)
        self.prefixes = Prefixes(np.concatenate([old, new]), np.concatenate([others, added]))
        self.before = old.size, last
        return int(old.size)

    def result(self, horizon_s: float) -> Served:
        """Run until the horizon, and count."""
        s = self.state
        finish(s, self.pool, self.prefixes, self.costs, self.block_tokens, horizon_s)
        at_work = np.arange(s.tokens.shape[2]) < s.members[:, :, None]
        stored = ((s.output - s.left) * at_work).sum(axis=(1, 2))
        prompt, reused, copied = s.prompted.sum(axis=0).tolist()
        return Served(s.spent_s, s.made, s.ended, stored, self.arrived, prompt, reused, copied, s.latencies)


def serve(periods: Iterable[Arrivals], costs: Costs, hosts: int, groups: int, slots: int, horizon_s: float) -> Served:
    """Run hosts until the horizon.

    Args:
        periods: Requests in order of arrival.
        costs: Seconds of a host's work.
        hosts: Number of hosts, each with one GPU.
        groups: Groups of drives per host; each sequence is in one group.
        slots: Sequences per group.
        horizon_s: End, seconds.
    """
    simulation = _Simulation(costs, hosts, groups, slots)
    for arrivals in periods:
        simulation.arrive(arrivals)
    return simulation.result(horizon_s)
