"""Continuous batching in modelled time: requests arrive, are prefilled, decode side by side, and leave.

Where their K and V lie, and who pauses, is a policy's choice before each step; how long the step is follows from that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from serving.engine import Engine
from serving.placement import Option, Problem, blocks_on_device
from serving.trace import Request, Trace


@dataclass(slots=True, eq=False)
class Live:
    """A request that has a slot, or had one.

    arrived_s: in seconds, whatever the trace counts in. made_s: when each token was made. step_s: of the steps that made them. delivered_s: when the last token left the
    deposit.
    """

    request: Request
    arrived_s: float
    made_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    delivered_s: float = 0.0
    deposit: deque[float] = field(default_factory=deque)
    option: Option = Option(0)
    paused: bool = False
    done_s: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens whose K and V are there."""
        return self.request.input_tokens + len(self.made_s) - 1

    @property
    def over(self) -> bool:
        return len(self.made_s) == self.request.output_tokens


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
    """Who decodes in the next step, and where their layers lie; the others pause."""

    running: Sequence[Live]
    options: Sequence[Option]


Policy = Callable[[Situation], Decision]


@dataclass(slots=True, kw_only=True)
class Served:
    """A run. fetched_bytes and the like are left to who knows the model: here are seconds and steps.

    steps: decode steps. away_layers, in_drives: layers of requests that were fetched, and attended in drives.
    """

    live: list[Live]
    slo_s: float
    end_s: float = 0.0
    steps: int = 0
    planned: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    idle_s: float = 0.0
    fetched_layers: int = 0
    attended_layers: int = 0
    most_blocks: int = 0


def serve(
    trace: Trace,
    engine: Engine,
    policy: Policy,
    slo_s: float,
    slots: int = 4,
    tick: Callable[[int], object] = lambda done: None,
) -> Served:
    """Serve a trace; who came first enters first, and its prefill stops everybody else's decoding.

    Arrivals in engine steps are counted in decode steps, so that a slow engine gets fewer in a time.
    """
    queue = _Queue(trace)
    mean_tokens = float(np.mean([each.tokens for each in trace.requests]))
    live: list[Live] = []
    done = Served(live=[], slo_s=slo_s)
    now_s, memory, changed = 0.0, dict[str, Any](), False
    while queue.left or live:
        if not live:
            idle_s = queue.idle(done.steps, now_s)
            done.idle_s += idle_s
            now_s += idle_s
        queue.arrive(done.steps, now_s)
        while queue.here and len(live) < slots:
            one = Live(*queue.here.popleft())
            took_s = one.request.input_tokens / engine.prefill_tokens_per_s
            now_s += took_s
            done.prefill_s += took_s
            _made(one, now_s, took_s)
            changed = True
            done.live.append(one)
            if one.over:
                one.done_s = now_s
            else:
                live.append(one)
        if not live:
            continue
        now = Situation(engine, live, slo_s, now_s, done.steps, changed, mean_tokens, memory)
        decision = policy(now)
        changed = False
        took_s = _step(engine, decision, done)
        now_s += took_s
        done.decode_s += took_s
        done.steps += 1
        for each in live:
            each.paused = True
        for each, option in zip(decision.running, decision.options, strict=True):
            each.option, each.paused = option, False
            _made(each, now_s, took_s)
        for each in [each for each in live if each.over]:
            each.done_s = now_s
            live.remove(each)
            changed = True
            tick(len(done.live) - len(live))
    done.end_s = now_s
    return done


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


def _made(live: Live, now_s: float, took_s: float) -> None:
    live.made_s.append(now_s)
    live.step_s.append(took_s)
    live.deposit.append(now_s)


def _step(engine: Engine, decision: Decision, done: Served) -> float:
    """How long a step takes; raises RuntimeError for one that does not fit the device."""
    if not decision.running:
        raise RuntimeError("a policy lets nobody decode")
    costs = engine.costs([each.tokens + 1 for each in decision.running])
    held = blocks_on_device(costs, decision.options)
    if held > costs.room:
        raise RuntimeError(f"a placement of {held} blocks, the device has {costs.room}")
    done.most_blocks = max(done.most_blocks, held)
    for option in decision.options:
        if option.in_drives:
            done.attended_layers += option.count
        else:
            done.fetched_layers += option.count
    return Problem(costs, [[option] for option in decision.options]).latency_s((0,) * len(decision.options))
