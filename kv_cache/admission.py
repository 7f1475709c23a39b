"""Admission control: batch slots, queue order, queue length and chunked prefill."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Literal

from pydantic import Field

from csd_spec.checked import frozen_value
from kv_cache.cost import ServingCost
from kv_cache.trace import Request, Trace

FULL, TOO_LONG = "the queue is full", "longer than the device has room for"


@frozen_value
class AdmissionConfig:
    """Admission control: batch slots, queue order and chunked prefill.

    Attributes:
        max_batch_size: Maximum number of requests in prefill or decode.
        prefill_chunk_tokens: Prompt tokens prefilled per decode step; 0: whole prompts while no request decodes.
        order: Queue order: `fcfs`, or `srtf` (shortest service time first).
        aging_factor: With `srtf`, a request is never overtaken by one that arrives more than `aging_factor` times its
            own service time later.
        max_queued_requests: Maximum number of queued requests; further ones are rejected. None: unlimited.
        reject: Reject a request that can never fit; otherwise the run ends with an error.
        max_paused_steps: Steps after which a paused request is scheduled without those that paused less. None: never.
    """

    max_batch_size: int = Field(default=4, ge=1)
    prefill_chunk_tokens: int = Field(default=0, ge=0)
    order: Literal["fcfs", "srtf"] = "fcfs"
    aging_factor: float = Field(default=10.0, ge=0)
    max_queued_requests: int | None = Field(default=None, ge=1)
    reject: bool = False
    max_paused_steps: int | None = Field(default=None, ge=1)


class WaitingQueue:
    """Future arrivals of a trace, queued requests and rejected requests.

    In a trace in steps, the steps without any request take no time.
    """

    def __init__(
        self, trace: Trace, cost: ServingCost, admission: AdmissionConfig, check: Callable[[Request], None]
    ) -> None:
        """Queue the requests of a trace.

        Args:
            trace: Requests in order of arrival.
            cost: Service times, for `srtf`.
            admission: Queue order and length.
            check: Raises ValueError for a request that can never fit.
        """
        if not admission.reject:
            for request in trace.requests:
                check(request)
        self._check = check
        self._arrivals, self._in_steps, self._skipped = deque(trace.requests), trace.unit == "steps", 0.0
        self._cost, self._admission, self._number = cost, admission, count()
        self._queued: list[tuple[float, int, Request, float]] = []
        self.rejected: list[tuple[Request, str]] = []

    def __len__(self) -> int:
        return len(self._queued)

    @property
    def has_requests(self) -> bool:
        return bool(self._arrivals or self._queued)

    @property
    def has_arrivals(self) -> bool:
        """Whether requests are still to arrive."""
        return bool(self._arrivals)

    def skip(self, steps: int) -> None:
        """Advance a trace in steps to its next arrival."""
        self._skipped += max(0.0, self._arrivals[0].arrival - steps - self._skipped)

    def idle(self, steps: int, now_s: float) -> float:
        """Seconds until a request is queued; 0 for a trace in steps, which skips idle steps."""
        if self._queued or not self._arrivals:
            return 0.0
        missing = self._arrivals[0].arrival - (steps + self._skipped if self._in_steps else now_s)
        if self._in_steps:
            self._skipped += max(0.0, missing)
            return 0.0
        return max(0.0, missing)

    def arrive(self, steps: int, now_s: float, free: int) -> None:
        """Queue or reject the requests that have arrived.

        Args:
            steps: Decode steps so far.
            now_s: Simulated time, seconds.
            free: Free batch slots, which are added to the queue length.
        """
        reached = steps + self._skipped if self._in_steps else now_s
        while self._arrivals and self._arrivals[0].arrival <= reached:
            request = self._arrivals.popleft()
            arrived_s = now_s if self._in_steps else request.arrival
            if self._too_long(request):
                self.rejected.append((request, TOO_LONG))
            elif (
                self._admission.max_queued_requests is not None
                and len(self._queued) >= self._admission.max_queued_requests + free
            ):
                self.rejected.append((request, FULL))
            else:
                heappush(self._queued, (self._due_s(request, arrived_s), next(self._number), request, arrived_s))

    def _too_long(self, request: Request) -> bool:
        try:
            self._check(request)
        except ValueError:
            return True
        return False

    def put(self, request: Request, now_s: float) -> None:
        """Queue a request that is not from a trace."""
        heappush(self._queued, (self._due_s(request, now_s), next(self._number), request, now_s))

    def remove(self, number: int) -> None:
        """Remove a queued request."""
        self._queued = [entry for entry in self._queued if entry[2].number != number]
        heapify(self._queued)

    def _due_s(self, request: Request, arrived_s: float) -> float:
        """Sort key of the queue. All queued requests age at the same rate, so the key is constant."""
        if self._admission.order == "fcfs":
            return 0.0
        work_s = (
            self._cost.compute.prefill_s(request.input_tokens) + request.output_tokens * self._cost.compute.linear_s()
        )
        return arrived_s + self._admission.aging_factor * work_s

    def take(self) -> tuple[Request, float]:
        """Pop the next request and its arrival time, seconds."""
        _, _, request, arrived_s = heappop(self._queued)
        return request, arrived_s

    def next_after(self, steps: int) -> tuple[float, float]:
        """Steps and simulated time of the next arrival; the one that the trace does not use is infinite."""
        if not self._arrivals:
            return math.inf, math.inf
        at = self._arrivals[0].arrival
        return (math.ceil(at - steps - self._skipped), math.inf) if self._in_steps else (math.inf, at)
