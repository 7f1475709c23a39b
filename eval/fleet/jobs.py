"""Runs of a fleet that do not depend on one another: on the cores of this machine, or as Ray tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from kv_cache.trace import Trace
from vcsd.progress import Tick, no_tick, progress
from vcsd_eval.fleet.machine import FleetHost
from vcsd_eval.fleet.simulation import Served, serve
from vcsd_eval.fleet.workload import Arrivals, backlog, periods
from vcsd_eval.sweep import cores, sweep, sweep_on_ray

BACKLOG_REQUESTS = 1 << 16  # drawn for a host that is never idle


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetJob:
    """One run.

    Attributes:
        machine: One of the hosts, which are alike.
        hosts: Number of hosts.
        trace: Requests.
        hours: Simulated time.
        rate: Arrivals per second over those of the trace.
        seed: Seed of the draws from the trace.
        waiting: `no`: requests arrive as in the trace; `trace`: all requests of the trace wait from the beginning;
            `drawn`: 65,536 requests wait, drawn one by one, so that they share no prefixes.
    """

    machine: FleetHost
    hosts: int
    trace: Trace
    hours: float
    rate: float = 1.0
    seed: int = 0
    waiting: Literal["no", "trace", "drawn"] = "no"

    def arrivals(self) -> Iterator[Arrivals]:
        """Requests, period by period."""
        if self.waiting == "drawn":
            yield backlog(self.trace, BACKLOG_REQUESTS, self.seed)
            return
        for period in periods(self.trace, self.hours, self.rate, self.seed):
            yield replace(period, arrival_s=np.zeros_like(period.arrival_s)) if self.waiting == "trace" else period


def longest_prompt(trace: Trace) -> int:
    """Tokens of the longest prompt of a trace."""
    return max(request.input_tokens for request in trace.requests)


def run_job(job: FleetJob, tick: Tick = no_tick) -> Served:
    """Run one job."""
    one = job.machine
    served = serve(
        job.arrivals(), one.costs(longest_prompt(job.trace)), job.hosts, one.groups, one.slots, job.hours * 3600
    )
    tick(None)
    return served


def run_jobs(jobs: Sequence[FleetJob], ray: str | None) -> list[Served]:
    """Run all jobs; their results do not depend on where they run.

    Args:
        jobs: Independent runs; the longest should come first.
        ray: Address of a Ray cluster; None: the cores of this machine.

    Raises:
        ValueError: Ray is not installed, or there is no cluster at this address.
    """
    with progress("runs", len(jobs)) as tick:
        return sweep_on_ray(run_job, jobs, ray, tick) if ray else sweep(run_job, jobs, cores(), tick)
