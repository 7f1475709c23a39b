"""Workloads of data sheets and reviews, as requests to `vcsd_eval.baselines.conventional.ConventionalSsd`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one size, `depth` in flight.

    Attributes:
        block_bytes: Size of a request.
        read_percent: Share of reads.
        sequential: One request after the other; otherwise aligned and uniform over the drive.
        in_cache: Writes go to cells that hold one bit, if the drive has such a cache.
        overwrites: Writes before the measurement, over the capacity, to reach steady state.
    """

    block_bytes: int
    read_percent: int
    sequential: bool = False
    in_cache: bool = False
    overwrites: int = 0


WORKLOADS = {
    "sequential_read": Workload(128 << 10, 100, sequential=True),
    "sequential_write": Workload(128 << 10, 0, sequential=True, in_cache=True),
    "sequential_write_direct": Workload(128 << 10, 0, sequential=True),
    "random_read": Workload(4096, 100),
    "random_write": Workload(4096, 0, in_cache=True),
    "random_write_steady": Workload(4096, 0, overwrites=3),
}
