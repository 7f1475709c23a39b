"""Continuous batching in modelled time: requests arrive, are prefilled, decode side by side, and leave.

Where their K and V lie, and who pauses, is a policy's choice before each step; how long the step is follows from that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numba import njit

from csd_spec.arrays import F64
from serving.engine import Engine
from serving.placement import Option, form, on_device, run
from serving.trace import Request, Trace


@dataclass(slots=True, eq=False)
class Live:
    """A request that has a slot, or had one.

    arrived_s: in seconds, whatever the trace counts in. made_s: when each token was made; step_s: how long the step was
    that made it, for the first one its prefill. delivered_s: when the last token left the deposit.
    """

    request: Request
    arrived_s: float
    bursts: list[tuple[F64, F64]] = field(default_factory=list)
    count: int = 0
    delivered_s: float = 0.0
    deposit: deque[float] = field(default_factory=deque)

    @property
    def made_s(self) -> F64:
        return np.concatenate([ends for ends, _ in self.bursts])

    @property
    def step_s(self) -> F64:
        return np.concatenate([took for _, took in self.bursts])

    @property
    def tokens(self) -> int:
        """Tokens whose K and V are there."""
        return self.request.input_tokens + self.count - 1

    @property
    def over(self) -> bool:
        return self.count == self.request.output_tokens

    def made(self, ends: F64, took: F64) -> None:
        """Tokens were made, by steps that ended then and took so long."""
        self.bursts.append((ends, took))
        self.count += ends.size
        self.deposit.extend(ends.tolist())


@dataclass(slots=True)
class Situation:
    """What a policy sees before a step. changed: whether requests came or went since the last one. memory: its own."""

    engine: Engine
    live: Sequence[Live]
    slo_s: float
    now_s: float
    step: int
    changed: bool
    mean_tokens: float
    memory: dict[str, Any]

    def deposited(self, live: Live) -> int:
        """Tokens that a request has made and not delivered yet: one leaves with each interval of the objective."""
        while live.deposit:
            leaves = max(live.deposit[0], live.delivered_s + self.slo_s if live.delivered_s else 0.0)
            if leaves > self.now_s:
                break
            live.deposit.popleft()
            live.delivered_s = leaves
        return len(live.deposit)


@dataclass(frozen=True, slots=True)
class Decision:
    """Who decodes, and where their layers lie; the others pause.

    steps: for how many the policy wants to be asked no more; it is asked earlier where requests come or go, or the
    placement no longer fits.
    """

    running: Sequence[Live]
    options: Sequence[Option]
    steps: int = 1


Policy = Callable[[Situation], Decision]


@dataclass(slots=True, kw_only=True)
class Served:
    """A run: the requests, and how long what took.

    steps: decode steps. fetched_layers, attended_layers: layers of requests that crossed the link, or drives attended.
    """

    slo_s: float
    live: list[Live] = field(default_factory=list)
    end_s: float = 0.0
    steps: int = 0
    decided: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    idle_s: float = 0.0
    fetched_layers: int = 0
    attended_layers: int = 0


class _Queue:
    """Requests that are to come, and those that are here and wait. Steps that nobody is there for take no time."""

    def __init__(self, trace: Trace) -> None:
        self._coming, self._in_steps, self._skipped = deque(trace.requests), trace.unit == "steps", 0.0
        self.here: deque[tuple[Request, float]] = deque()

    @property
    def left(self) -> bool:
        return bool(self._coming or self.here)

    def idle(self, steps: int, now_s: float) -> float:
        """Seconds until somebody is here."""
        if self.here:
            return 0.0
        missing = self._coming[0].arrival - (steps + self._skipped if self._in_steps else now_s)
        if self._in_steps:
            self._skipped += max(0.0, missing)
            return 0.0
        return max(0.0, missing)

    def arrive(self, steps: int, now_s: float) -> None:
        """Let those come whose time it is."""
        reached = steps + self._skipped if self._in_steps else now_s
        while self._coming and self._coming[0].arrival <= reached:
            request = self._coming.popleft()
            self.here.append((request, now_s if self._in_steps else request.arrival))

    def next_after(self, steps: int) -> tuple[float, float]:
        """How many steps on somebody comes, and at which second: the other one is infinite."""
        if not self._coming:
            return math.inf, math.inf
        at = self._coming[0].arrival
        return (math.ceil(at - steps - self._skipped), math.inf) if self._in_steps else (math.inf, at)


def serve(
    trace: Trace,
    engine: Engine,
    policy: Policy,
    slo_s: float,
    slots: int = 4,
    tick: Callable[[int], object] = lambda done: None,
) -> Served:
    """Serve a trace; who came first enters first, and its prefill stops everybody else's decoding.

    Arrivals in engine steps are counted in decode steps, so that a slow engine gets fewer in a time. Raises ValueError
    for a request that the device never has room for.
    """
    queue, done, live = _Queue(trace), Served(slo_s=slo_s), list[Live]()
    mean_tokens = float(np.mean([each.tokens for each in trace.requests]))
    engine.check(trace.requests)
    now_s, memory, changed = 0.0, dict[str, Any](), False
    while queue.left or live:
        if not live:
            idle_s = queue.idle(done.steps, now_s)
            done.idle_s += idle_s
            now_s += idle_s
        queue.arrive(done.steps, now_s)
        while queue.here and len(live) < slots:
            one = Live(*queue.here.popleft())
            took_s = engine.prefill_s(one.request.input_tokens)
            now_s += took_s
            done.prefill_s += took_s
            queue.arrive(done.steps, now_s)  # some have come meanwhile
            one.made(np.array([now_s]), np.array([took_s]))
            done.live.append(one)
            if not one.over:
                live.append(one)
                changed = True
        if live:
            now = Situation(engine, live, slo_s, now_s, done.steps, changed, mean_tokens, memory)
            until = queue.next_after(done.steps) if len(live) < slots else (math.inf, math.inf)
            now_s, changed = _decode(now, policy(now), until, done), False
        for each in [each for each in live if each.over]:
            live.remove(each)
            changed = True
        tick(len(done.live) - len(live))
    done.end_s = now_s
    return done


def _decode(now: Situation, decision: Decision, until: tuple[float, float], done: Served) -> float:
    """Steps until somebody comes or goes, or the policy is to be asked; returns when the last one ends.

    Raises RuntimeError for a placement that does not fit the device.
    """
    engine, running = now.engine, decision.running
    if not running:
        raise RuntimeError("a policy lets nobody decode")
    most = min(decision.steps, until[0], *(each.request.output_tokens - each.count for each in running))
    took = np.zeros(max(1, int(most)))
    forms = [form(engine.layers, option) for option in decision.options]
    asked, due, in_drives = (np.array([[each[k]] for each in forms]) for k in range(3))
    shares = np.array([on_device(engine.layers, option) for option in decision.options])
    tokens = np.array([each.tokens + 1 for each in running])
    count = _steps(engine.line, engine.room_blocks, tokens, asked, due, in_drives, shares, until[1] - now.now_s, took)
    if not count:
        raise RuntimeError(f"a placement of {decision.options} does not fit the device")
    ends = now.now_s + np.cumsum(took[:count])
    for each, option in zip(running, decision.options, strict=True):
        each.made(ends, took[:count])
        if option.in_drives:
            done.attended_layers += count * option.count
        else:
            done.fetched_layers += count * option.count
    done.steps += count
    done.decided += 1
    done.decode_s += float(took[:count].sum())
    return float(ends[-1])


@njit(cache=True, nogil=True)
def _steps(line, room, tokens, asked, due, in_drives, shares, until_s, took):  # type: ignore[no-untyped-def]
    """Steps of requests that grow by a token in each, until they do not fit or the time is over; how many, and how long
    each took. line: `Engine.line`.
    """
    step_s, token_s, fetch_s, fetch_token_s, call_s, read_token_s, block = line
    R, L = tokens.size, asked.shape[2]
    compute, ends, slower = np.zeros(L), np.zeros(L + 1), np.zeros(in_drives.shape)
    fetch, chosen, passed = np.zeros(R), np.zeros(R, np.int64), 0.0
    for step in range(took.size):
        held = 0
        for r in range(R):
            held += shares[r] * -(-(tokens[r] + step) // int(block))
        if held > room * L or passed >= until_s:
            return step
        compute[:] = (step_s + token_s * (tokens.sum() + R * step)) / L
        for r in range(R):
            now = tokens[r] + step
            fetch[r] = (fetch_s + fetch_token_s * now) / L
            slower[r] = in_drives[r] * (read_token_s * now + call_s / R - token_s * now / L)
        run(compute, fetch, asked, due, slower, chosen, ends)
        took[step] = ends[L]
        passed += ends[L]
    return took.size
