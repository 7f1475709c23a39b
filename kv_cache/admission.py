"""Who is let in: slots, the order of those who wait, how many may, and how prompts are prefilled beside the others."""

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
    """What becomes of requests until they decode.

    slots: requests that are prefilled or decode. chunk: tokens of the oldest prompt that are prefilled beside each
    decode step; 0: whole prompts, while nobody decodes. order: of those who wait, as they came or the shortest first.
    aging: under the latter, nobody is passed by a request that comes so many times its own work later. queue: how many
    may wait, more are rejected; None: all. reject: a request that there never is room for, instead of ending the run.
    patience: steps after which one that has a slot and pauses is asked about without those that need not; None: never.
    """

    slots: int = Field(default=4, ge=1)
    chunk: int = Field(default=0, ge=0)
    order: Literal["fcfs", "srtf"] = "fcfs"
    aging: float = Field(default=10.0, ge=0)
    queue: int | None = Field(default=None, ge=1)
    reject: bool = False
    patience: int | None = Field(default=None, ge=1)


class WaitingQueue:
    """Requests that are to come, those that are here and wait, and those that were rejected.

    Steps that nobody is there for take no time.
    """

    def __init__(
        self, trace: Trace, cost: ServingCost, admission: AdmissionConfig, check: Callable[[Request], None]
    ) -> None:
        """check: Raises ValueError for a request that there never is room for."""
        if not admission.reject:
            for each in trace.requests:
                check(each)
        self._check = check
        self._coming, self._in_steps, self._skipped = deque(trace.requests), trace.unit == "steps", 0.0
        self._cost, self._admission, self._number = cost, admission, count()
        self._here: list[tuple[float, int, Request, float]] = []
        self.rejected: list[tuple[Request, str]] = []

    def __len__(self) -> int:
        return len(self._here)

    @property
    def left(self) -> bool:
        return bool(self._coming or self._here)

    @property
    def coming(self) -> bool:
        """Whether requests are still to arrive."""
        return bool(self._coming)

    def skip(self, steps: int) -> None:
        """Let the next request of a trace in steps arrive now."""
        self._skipped += max(0.0, self._coming[0].arrival - steps - self._skipped)

    def idle(self, steps: int, now_s: float) -> float:
        """Seconds until somebody is here."""
        if self._here or not self._coming:
            return 0.0
        missing = self._coming[0].arrival - (steps + self._skipped if self._in_steps else now_s)
        if self._in_steps:
            self._skipped += max(0.0, missing)
            return 0.0
        return max(0.0, missing)

    def arrive(self, steps: int, now_s: float, free: int) -> None:
        """Let those come whose time it is. free: slots for which nobody has to wait."""
        reached = steps + self._skipped if self._in_steps else now_s
        while self._coming and self._coming[0].arrival <= reached:
            request = self._coming.popleft()
            arrived_s = now_s if self._in_steps else request.arrival
            if self._too_long(request):
                self.rejected.append((request, TOO_LONG))
            elif self._admission.queue is not None and len(self._here) >= self._admission.queue + free:
                self.rejected.append((request, FULL))
            else:
                heappush(self._here, (self._due_s(request, arrived_s), next(self._number), request, arrived_s))

    def _too_long(self, request: Request) -> bool:
        try:
            self._check(request)
        except ValueError:
            return True
        return False

    def put(self, request: Request, now_s: float) -> None:
        """A request has come that no trace told of."""
        heappush(self._here, (self._due_s(request, now_s), next(self._number), request, now_s))

    def remove(self, number: int) -> None:
        """Forget a request that waits."""
        self._here = [each for each in self._here if each[2].number != number]
        heapify(self._here)

    def _due_s(self, request: Request, arrived_s: float) -> float:
        """What the order goes by. All who wait grow old at the same rate, so it stays what it is."""
        if self._admission.order == "fcfs":
            return 0.0
        work_s = (
            self._cost.compute.prefill_s(request.input_tokens) + request.output_tokens * self._cost.compute.linear_s()
        )
        return arrived_s + self._admission.aging * work_s

    def take(self) -> tuple[Request, float]:
        """The next, and when it came."""
        _, _, request, arrived_s = heappop(self._here)
        return request, arrived_s

    def next_after(self, steps: int) -> tuple[float, float]:
        """How many steps on somebody comes, and at which second: the other one is infinite."""
        if not self._coming:
            return math.inf, math.inf
        at = self._coming[0].arrival
        return (math.ceil(at - steps - self._skipped), math.inf) if self._in_steps else (math.inf, at)
