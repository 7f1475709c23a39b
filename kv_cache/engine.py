"""Continuous batching in modelled time: requests arrive, are prefilled, decode side by side, and leave.

Where their K and V lie, and who pauses, is a policy's choice before each step; how long the step is follows from that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from csd_io.compiled import njit
from csd_spec.arrays import F64
from kv_cache.admission import AdmissionConfig, WaitingQueue
from kv_cache.cost import ServingCost
from kv_cache.planner.problem import Offload, form, on_device, run
from kv_cache.trace import Request, Trace


@dataclass(slots=True, eq=False)
class SequenceState:
    """A request that has a slot, or had one.

    arrived_s: in seconds, whatever the trace counts in. made_s: when each token was made; step_s: how long the step was
    that made it, for the first one its prefill. delivered_s: when the last token left the deposit. entered_s: when its
    prefill began. paused: steps since it decoded.
    """

    request: Request
    arrived_s: float
    bursts: list[tuple[F64, F64]] = field(default_factory=list)
    count: int = 0
    delivered_s: float = 0.0
    deposit: deque[float] = field(default_factory=deque)
    entered_s: float = 0.0
    paused: int = 0

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
class SchedulerState:
    """What a policy sees before a step. changed: whether requests came or went since the last one. memory: its own."""

    cost: ServingCost
    live: Sequence[SequenceState]
    slo_s: float
    now_s: float
    step: int
    changed: bool
    mean_tokens: float
    memory: dict[str, Any]

    def deposited(self, live: SequenceState) -> int:
        """Tokens that a request has made and not delivered yet: one leaves with each interval of the objective."""
        while live.deposit:
            leaves = max(live.deposit[0], live.delivered_s + self.slo_s if live.delivered_s else 0.0)
            if leaves > self.now_s:
                break
            live.deposit.popleft()
            live.delivered_s = leaves
        return len(live.deposit)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """Who decodes, and where their layers lie; the others pause.

    steps: for how many the policy wants to be asked no more; it is asked earlier where requests come or go, or the
    placement no longer fits.
    """

    running: Sequence[SequenceState]
    options: Sequence[Offload]
    steps: int = 1


Policy = Callable[[SchedulerState], SchedulerOutput]


@dataclass(slots=True, kw_only=True)
class RunResult:
    """A run: the requests, and how long what took.

    rejected: who was not let in, and why. steps: decode steps. fetched_layers, attended_layers: layers of requests that
    crossed the link, or drives attended. link_bytes, drive_bytes: of K and V that did.
    """

    slo_s: float
    live: list[SequenceState] = field(default_factory=list)
    rejected: list[tuple[Request, str]] = field(default_factory=list)
    end_s: float = 0.0
    steps: int = 0
    decided: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    idle_s: float = 0.0
    fetched_layers: int = 0
    attended_layers: int = 0
    link_bytes: float = 0.0
    drive_bytes: float = 0.0


def serve(
    trace: Trace,
    cost: ServingCost,
    policy: Policy,
    slo_s: float,
    admission: AdmissionConfig = AdmissionConfig(),
    tick: Callable[[int], object] = lambda done: None,
) -> RunResult:
    """Serve a trace. tick: told now and then how many requests have left.

    Arrivals in engine steps are counted in decode steps, so that a slow engine gets fewer in a time. Raises ValueError
    for a request that the device never has room for, unless such are rejected.
    """
    loop = _Loop(trace, cost, policy, slo_s, admission)
    while loop.queue.left or loop.live or loop.prompt:
        loop.admit()
        loop.go_on()
        tick(len(loop.done.live) + len(loop.done.rejected) - len(loop.live))
    loop.done.end_s = loop.now_s
    return loop.done


class _Loop:
    """The state of a run. live: who decodes, or pauses. prompt: who is prefilled in chunks, prefilled so far."""

    def __init__(
        self, trace: Trace, cost: ServingCost, policy: Policy, slo_s: float, admission: AdmissionConfig
    ) -> None:
        self.cost, self.policy, self.slo_s, self.admission = cost, policy, slo_s, admission
        self.queue = WaitingQueue(trace, cost, admission)
        self.done = RunResult(slo_s=slo_s, rejected=self.queue.rejected)
        self.live, self.prompt, self.prefilled = list[SequenceState](), cast(SequenceState | None, None), 0
        self.now_s, self.changed, self._memory = 0.0, False, dict[str, Any]()
        self._asked = list[int]()
        self._mean_tokens = float(np.mean([each.tokens for each in trace.requests]))

    def _free(self) -> int:
        return self.admission.slots - len(self.live) - (self.prompt is not None)

    def _arrive(self) -> None:
        self.queue.arrive(self.done.steps, self.now_s, self._free())

    def admit(self) -> None:
        """Give free slots to those who wait, and prefill what is not prefilled in chunks, beside others."""
        if not self.live and not self.prompt:
            idle_s = self.queue.idle(self.done.steps, self.now_s)
            self.done.idle_s += idle_s
            self.now_s += idle_s
        self._arrive()
        if self.prompt and not self.live:
            self._prefill()
        while self.queue and self._free() and not self.prompt:
            self.prompt = SequenceState(*self.queue.take(), entered_s=self.now_s)
            self.done.live.append(self.prompt)
            if not (self.admission.chunk and self.live):  # nobody decodes beside it
                self._prefill()

    def _prefill(self) -> None:
        """What is left of a prompt at once."""
        assert self.prompt
        took_s = self.cost.compute.prefill_s(self.prompt.request.input_tokens, self.prefilled)
        self.now_s += took_s
        self.done.prefill_s += took_s
        self._arrive()  # some have come meanwhile
        self._enter(self.prompt, took_s)

    def _enter(self, live: SequenceState, took_s: float) -> None:
        """A prompt is prefilled: the first token is there."""
        live.made(np.array([self.now_s]), np.array([took_s]))
        self.prompt, self.prefilled = None, 0
        if not live.over:
            self.live.append(live)
            self.changed = True

    def go_on(self) -> None:
        """Steps until somebody comes or goes, a prompt is prefilled, or the policy is to be asked."""
        if not self.live:
            return
        now = self._situation()
        decision, (steps, until_s) = self.policy(now), (math.inf, math.inf)
        if self._free() and not self.prompt:
            steps, until_s = self.queue.next_after(self.done.steps)
        until = min(steps, self.admission.patience or math.inf), until_s
        ends = _decode(now, decision, until, self._chunks(), self.done)
        self.now_s, self.changed = float(ends[-1]), False
        for each in self.live:
            each.paused += ends.size
        for each in decision.running:
            each.paused = 0
        self._arrive()
        if self.prompt:
            self.prefilled = min(self.prefilled + ends.size * self.admission.chunk, self.prompt.request.input_tokens)
            if self.prefilled == self.prompt.request.input_tokens:
                self._enter(self.prompt, self.now_s - self.prompt.entered_s)
        for each in [each for each in self.live if each.over]:
            self.live.remove(each)
            each.deposit.clear()
            self.changed = True

    def _situation(self) -> SchedulerState:
        """What the policy is asked about: all, or those who have paused for too long."""
        patience, among = self.admission.patience, self.live
        if patience:
            among = [each for each in self.live if each.paused >= patience] or self.live
        who, before = [each.request.number for each in among], self._asked
        self._asked, changed = who, self.changed or who != before
        step, mean = self.done.steps, self._mean_tokens
        return SchedulerState(self.cost, among, self.slo_s, self.now_s, step, changed, mean, self._memory)

    def _chunks(self) -> F64 | None:
        """Seconds of each chunk that is left of the prompt."""
        if not self.prompt:
            return None
        end, chunk = self.prompt.request.input_tokens, self.admission.chunk
        begins = range(self.prefilled, end, chunk)
        return np.array([self.cost.compute.prefill_s(min(begin + chunk, end), begin) for begin in begins])


def _decode(
    now: SchedulerState, decision: SchedulerOutput, until: tuple[float, float], beside: F64 | None, done: RunResult
) -> F64:
    """Steps until somebody comes or goes, or the policy is to be asked; when they end.

    beside: seconds that steps take longer, for what else the device does in them; there are no more of them. Raises
    RuntimeError for a placement that does not fit the device.
    """
    cost, running = now.cost, decision.running
    if not running:
        raise RuntimeError("a policy lets nobody decode")
    most = min(decision.steps, until[0], *(each.request.output_tokens - each.count for each in running))
    took = np.zeros(max(1, int(most if beside is None else min(most, beside.size))))
    beside = np.zeros(took.size) if beside is None else beside
    forms = [form(cost.layers, option) for option in decision.options]
    asked, due, in_drives = (np.array([[each[k]] for each in forms]) for k in range(3))
    shares = np.array([on_device(cost.layers, option) for option in decision.options])
    tokens = np.array([each.tokens + 1 for each in running])
    within_s = until[1] - now.now_s
    count = _steps(
        cost.line(len(running)), cost.room_blocks, tokens, asked, due, in_drives, shares, within_s, beside, took
    )
    if not count:
        raise RuntimeError(f"a placement of {decision.options} does not fit the device")
    took = took[:count]
    ends = now.now_s + np.cumsum(took)
    for each, option, held in zip(running, decision.options, tokens.tolist(), strict=True):
        each.made(ends, took)
        read = option.count * (count * held + count * (count - 1) // 2)  # tokens, over all layers away
        if option.in_drives and cost.drives:
            done.attended_layers += count * option.count
            done.drive_bytes += read * cost.drives.token_bytes
        else:
            done.fetched_layers += count * option.count
            done.link_bytes += read * cost.token_bytes
    done.steps += count
    done.decided += 1
    beside_s = float(beside[:count].sum())
    done.prefill_s += beside_s
    done.decode_s += float(took.sum()) - beside_s
    return ends


@njit(cache=True, nogil=True)
def _steps(line, room, tokens, asked, due, in_drives, shares, until_s, beside, took):  # type: ignore[no-untyped-def]
    """Steps of requests that grow by a token in each, until they do not fit or the time is over; how many, and how long
    each took. line: `ServingCost.line`. beside: what each takes longer.
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
        took[step] = ends[L] + beside[step]
        passed += took[step]
    return took.size
