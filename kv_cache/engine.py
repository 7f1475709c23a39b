"""Continuous-batching engine: admit arrivals, schedule an iteration, run it, retire finished sequences.

`simulation.py` runs it in simulated time until a trace is served. `vcsd.serve` runs the same engine with real bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from csd_spec.arrays import F64
from kv_cache.admission import AdmissionConfig, WaitingQueue
from kv_cache.block_table import PolicyError
from kv_cache.cost import ServingCost
from kv_cache.event_timer import EventTimer
from kv_cache.hardware import DEVICE, HOST
from kv_cache.metrics import RunResult
from kv_cache.planner.problem import Offload, latency_s
from kv_cache.request import SequenceState
from kv_cache.scheduler import IterationResult, Policy, SchedulerOutput, SchedulerState, check_host, check_output
from kv_cache.trace import Request, Trace
from kv_cache.transfer.chain import decode_s
from kv_cache.transfer.sequences import SequenceStore

NO_TRACE = Trace(name="none", requests=())
# REPLAN: ratio of measured to modelled time beyond which the policy plans again. EMA: weight of the newest step.
REPLAN, EMA = 1.25, 0.1


class Engine:
    """Requests, a policy, and the simulated time of its iterations.

    Attributes:
        sequences: Admitted requests in decode, including paused ones.
        prompt: The request in prefill.
        now_s: Simulated time, seconds.
        store: Whole sequences in tiers, for time-slicing policies.
        host_bytes: Host memory for offloaded layers, bytes.
        events: Times each iteration by simulated links and copies; None: by a sum or the compiled chain.
        done: Totals of the run; also its requests if a trace is served.
    """

    def __init__(
        self,
        policy: Policy,
        cost: ServingCost,
        slo_s: float = math.inf,
        admission: AdmissionConfig = AdmissionConfig(),
        trace: Trace | None = None,
        store: SequenceStore | None = None,
        longest_tokens: int = 0,
    ) -> None:
        self.policy, self.cost, self.slo_s, self.admission, self.store = policy, cost, slo_s, admission, store
        requests = trace.requests if trace else ()
        self.queue = WaitingQueue(trace or NO_TRACE, cost, admission, self.check)
        self.sequences: list[SequenceState] = []
        self.prompt: SequenceState | None = None
        self.now_s, self.changed = 0.0, False
        self.done = RunResult(slo_s=slo_s, rejected=self.queue.rejected)
        self._keep, self._asked = trace is not None, list[int]()
        self._tokens, self._requests = sum(request.tokens for request in requests), len(requests)
        self._given, self._slowdown, self._longest_tokens = cost, 1.0, longest_tokens
        self.events: EventTimer | None = None
        self.host_bytes = math.inf

    def check(self, request: Request) -> None:
        """Raise ValueError if a request can never fit."""
        if self.store is not None:
            self.store.levels.check(request.tokens + 1, request.number)
        else:
            self.cost.check([request])

    def add(self, request: Request) -> None:
        """Queue a request that arrives now."""
        self._tokens, self._requests = self._tokens + request.tokens, self._requests + 1
        self.queue.put(request, self.now_s)

    def remove(self, number: int) -> None:
        """Remove a request in any state."""
        self.queue.remove(number)
        for sequence in self._admitted():
            if sequence.number == number:
                self._retire(sequence)

    def set_limits(self, limits: Mapping[str, int]) -> None:
        """Change limits of tiers between two iterations; the policy is asked again before the next one.

        Args:
            limits: Bytes by tier; other tiers keep their limits.
        """
        if DEVICE in limits:
            self.cost, self._given = (cost.with_room(limits[DEVICE]) for cost in (self.cost, self._given))
        self.host_bytes = limits.get(HOST, self.host_bytes)
        if self.events is not None:
            self.events.runner.set_limits(limits)
        if self.store is not None:
            self.store.set_levels(self.store.levels.with_limits(limits))
        self.changed = True

    def run(self, tick: Callable[[int], object] = lambda done: None) -> RunResult:
        """Serve until no request is left; `tick` gets the number of finished and rejected requests after each step."""
        done = self.done
        while self.step():
            tick(len(done.sequences) + len(done.rejected) - len(self.sequences))
        done.end_s = self.now_s
        return done

    def step(self) -> bool:
        """Run one iteration, or a burst of equal ones, in simulated time; False if no request is left."""
        output = self.schedule()
        if output is None:
            return False
        self.complete(output)
        return True

    def schedule(self) -> SchedulerOutput | None:
        """Ask the policy for the next iteration; None if no request is left."""
        while True:
            self._admit()
            if not (self.sequences or self.prompt):
                if not self.queue.has_requests:
                    return None
                self._idle()
                continue
            state = self._state()
            output = self.policy.schedule(state)
            if self.store is not None:
                self.now_s = self.store.now_s
            if output is None:
                self._wait()
                continue
            check_output(self.policy, output, self._admitted(), self.cost.layers)
            if not (self.prompt and self.prompt.number in output.num_scheduled_tokens and len(output.placement) == 1):
                self._asked = [sequence.number for sequence in state.sequences]
            return output

    def complete(
        self,
        output: SchedulerOutput,
        ran: Collection[int] | None = None,
        took_s: float | None = None,
        most: float = math.inf,
    ) -> IterationResult:
        """Account for an iteration that `schedule` decided.

        Args:
            output: The decision.
            ran: Requests that were computed; None: all.
            took_s: Measured time of the decode step, seconds.
            most: Maximum number of decode steps.
        """
        scheduled = {
            sequence: output.num_scheduled_tokens[sequence.number]
            for sequence in self._admitted()
            if sequence.number in output.num_scheduled_tokens and (ran is None or sequence.number in ran)
        }
        prefills = {sequence: count for sequence, count in scheduled.items() if sequence.prefills}
        decoding = [sequence for sequence in scheduled if not sequence.prefills]
        options = [output.placement.get(sequence.number, Offload(0)) for sequence in decoding]
        self.done.decided += bool(decoding)
        offloads = [option for option in options if isinstance(option, Offload)]
        if self.events is not None:
            result = self._by_events(self.events, decoding, prefills, output)
        elif decoding and len(offloads) == len(options) and not self.policy.admits:
            result = self._chain(decoding, offloads, prefills, min(output.num_steps, most))
        else:
            if self._keep and any(output.leaves_device(sequence.number) for sequence in scheduled):
                raise PolicyError(f"policy {self.policy.name}: it places layers by tier, so it must not be `strided`")
            result = self._jump(decoding, prefills)
        if took_s is not None and result.timed_by == "chain":
            self._recalibrate(decoding, offloads, took_s)
        ended = [sequence for sequence in scheduled if sequence.finished]
        finished = tuple(sequence.number for sequence in ended)
        for sequence in ended:
            self._retire(sequence)
            sequence.deposit.clear()
        result = replace(result, finished=finished)
        self.done.timed_by[result.timed_by] = self.done.timed_by.get(result.timed_by, 0) + 1
        self.policy.update(output, result)
        return result

    # Admitted and queued requests

    def _admitted(self) -> list[SequenceState]:
        """All admitted requests."""
        return [*self.sequences, *([self.prompt] if self.prompt else [])]

    def _free(self) -> int:
        return self.admission.max_batch_size - len(self.sequences) - (self.prompt is not None)

    def _arrive(self) -> None:
        self.queue.arrive(self.done.steps, self.now_s, self._free())

    def _admit(self) -> None:
        """Give slots to arrived requests: one prompt at a time, or all of them if the policy admits requests itself."""
        self._arrive()
        while self.queue and (self.policy.admits or (self._free() and self.prompt is None)):
            sequence = SequenceState(*self.queue.take(), entered_s=self.now_s)
            if self._keep:
                self.done.sequences.append(sequence)
            if self.policy.admits:
                self.sequences.append(sequence)
                self.changed = True
            else:
                self.prompt = sequence

    def _idle(self) -> None:
        """Advance the time to the next arrival."""
        idle_s = self.queue.idle(self.done.steps, self.now_s)
        self.done.idle_s += idle_s
        self._advance_time(idle_s)

    def _advance_time(self, seconds: float) -> None:
        """Advance the time, including transfers in flight."""
        self.now_s += seconds
        if self.store is not None:
            self.store.run_until(self.now_s)

    def _wait(self) -> None:
        """Advance the time to the end of a copy or an arrival; raises RuntimeError if neither is pending."""
        ends = [move.end_s for move in self.store.running if move.end_s is not None] if self.store is not None else []
        steps, arrives_s = self.queue.next_after(self.done.steps)
        if steps < math.inf and not ends:
            self.queue.skip(self.done.steps)
            return
        if arrives_s < math.inf:
            ends.append(arrives_s)
        if not ends:
            raise RuntimeError(
                f"deadlock: policy {self.policy.name} schedules no request, no copy is in flight and no request will "
                "arrive: it must schedule at least one"
            )
        stalled_s = max(0.0, min(ends) - self.now_s)
        self.done.stalled_s += stalled_s
        self._advance_time(stalled_s)

    def _retire(self, sequence: SequenceState) -> None:
        if sequence in self.sequences:
            self.sequences.remove(sequence)
            self.changed = True
        elif sequence is self.prompt:
            self.prompt = None
        self.policy.forget(sequence.number)
        if self.events is not None:
            self.events.forget(sequence.number)

    def _state(self) -> SchedulerState:
        """State for the policy: all sequences, or only those that have paused for `patience` steps."""
        patience, among = self.admission.max_paused_steps, self.sequences
        if patience:
            among = [sequence for sequence in among if sequence.paused >= patience] or among
        return SchedulerState(
            cost=self.cost,
            sequences=among,
            filling=self.prompt,
            chunk=self.admission.prefill_chunk_tokens,
            slo_s=self.slo_s,
            now_s=self.now_s,
            step=self.done.steps,
            changed=self.changed or [sequence.number for sequence in among] != self._asked,
            mean_tokens=self._tokens / max(1, self._requests),
            longest_tokens=self._longest_tokens,
            max_batch_size=self.admission.max_batch_size,
            store=self.store,
            coming=self.queue.has_arrivals,
        )

    # Time of an iteration

    def _chain(
        self,
        decoding: Sequence[SequenceState],
        options: Sequence[Offload],
        prefills: dict[SequenceState, int],
        most: float,
    ) -> IterationResult:
        """Decode steps until the next decision of the policy, each with a chunk of the prompt if one is prefilled."""
        steps, until_s = math.inf, math.inf
        if self._free() and self.prompt is None:
            steps, until_s = self.queue.next_after(self.done.steps)
        left = min(sequence.request.output_tokens - sequence.num_output_tokens for sequence in decoding)
        most = min(most, steps, self.admission.max_paused_steps or math.inf, left)
        tokens, extra_s = [sequence.num_computed_tokens + 1 for sequence in decoding], self._chunks(prefills)
        took = decode_s(self.cost, tokens, options, int(most), within_s=until_s - self.now_s, extra_s=extra_s)
        ends_at = [held + took.size - 1 for held in tokens]
        check_host(self.policy.name, options, ends_at, self.cost.token_bytes, self.host_bytes)
        ends = self.now_s + np.cumsum(took)
        for sequence, option, held in zip(decoding, options, tokens, strict=True):
            sequence.add_tokens(ends, took)
            self._count(option, held, took.size)
        added_s = 0.0 if extra_s is None else float(extra_s[: took.size].sum())
        self.done.steps += took.size
        self.done.prefill_s += added_s
        self.done.decode_s += float(took.sum()) - added_s
        self.now_s, self.changed = float(ends[-1]), False
        for sequence in self.sequences:
            sequence.paused = 0 if sequence in decoding else sequence.paused + took.size
        self._arrive()
        for prompt, count in prefills.items():
            self._computed(prompt, min(count * took.size, prompt.num_missing_tokens), self.now_s - prompt.entered_s)
        return IterationResult(float(took.sum()), took.size, "chain")

    def _jump(self, decoding: Sequence[SequenceState], prefills: dict[SequenceState, int]) -> IterationResult:
        """One iteration with the KV cache on the device: the sum of its parts.

        If the policy admits requests itself, a prompt is computed along with a decode step and takes part in it.
        """
        prefill_s = sum(self._prefill_s(prefills).values())
        batch = [sequence.num_computed_tokens + 1 for sequence in decoding]
        if self.policy.admits:
            batch += [prefill.num_tokens for prefill in prefills]
        step_s = self.cost.compute.decode_s(len(batch), sum(batch)) if batch else 0.0
        return self._account(decoding, prefills, prefill_s + step_s, prefill_s, "jump")

    def _by_events(
        self,
        events: EventTimer,
        decoding: Sequence[SequenceState],
        prefills: dict[SequenceState, int],
        output: SchedulerOutput,
    ) -> IterationResult:
        """One iteration whose copies overlap with the computation of the layers."""
        prefill_s = self._prefill_s(prefills)
        new = {sequence.number: prefills.get(sequence, 1) for sequence in (*decoding, *prefills)}
        took_s = events.run(self.now_s, new, prefill_s, output)
        self.done.link_bytes = events.fetched_bytes
        compute_s = sum(prefill_s.values()) if decoding else took_s
        return self._account(decoding, prefills, took_s, compute_s, "events")

    def _prefill_s(self, prefills: dict[SequenceState, int]) -> dict[int, float]:
        """Compute time of prompts or their chunks, seconds, by request number."""
        prefill_s = self.cost.compute.prefill_s
        return {
            prompt.number: prefill_s(prompt.num_computed_tokens + count, prompt.num_computed_tokens)
            for prompt, count in prefills.items()
        }

    def _account(
        self,
        decoding: Sequence[SequenceState],
        prefills: dict[SequenceState, int],
        took_s: float,
        prefill_s: float,
        timed_by: str,
    ) -> IterationResult:
        """Account for one iteration of `took_s` seconds, `prefill_s` of it for prompts."""
        self.done.prefill_s += prefill_s
        self.done.decode_s += took_s - prefill_s
        self._advance_time(took_s)
        if decoding:
            self.done.steps += 1
            self.changed = False
        for sequence in decoding:
            sequence.add_tokens(np.array([self.now_s]), np.array([took_s]))
        self._arrive()  # arrivals during the iteration
        for prompt, count in prefills.items():
            self._computed(prompt, count, took_s)
        return IterationResult(took_s, int(bool(decoding)), timed_by)

    def _computed(self, sequence: SequenceState, tokens: int, took_s: float) -> None:
        """Count computed prompt tokens; the last of them also produces an output token."""
        sequence.add_computed(tokens)
        if sequence.num_missing_tokens:
            return
        sequence.add_tokens(np.array([self.now_s]), np.array([took_s]))
        if sequence is self.prompt:
            self.prompt = None
            if not sequence.finished:
                self.sequences.append(sequence)
                self.changed = True

    def _chunks(self, prefills: dict[SequenceState, int]) -> F64 | None:
        """Time of each remaining chunk of the prompt, (chunks,) float64 seconds; None without a prompt."""
        if not prefills:
            return None
        ((sequence, chunk),) = prefills.items()
        end, first = sequence.num_tokens, sequence.num_computed_tokens
        begins = range(first, end, chunk)
        return np.array([self.cost.compute.prefill_s(min(begin + chunk, end), begin) for begin in begins])

    def _count(self, option: Offload, held: int, steps: int) -> None:
        """Count layers and bytes of a request that were fetched, or attended in drives, in `steps` steps."""
        done, count = self.done, steps * option.count
        read = option.count * (steps * held + steps * (steps - 1) // 2)  # tokens, over all offloaded layers
        if option.in_drives and self.cost.drives:
            done.attended_layers += count
            done.drive_bytes += read * self.cost.drives.token_bytes
        else:
            done.fetched_layers += count
            done.link_bytes += read * self.cost.token_bytes

    def _recalibrate(self, decoding: Sequence[SequenceState], options: Sequence[Offload], took_s: float) -> None:
        """Correct the cost model by a measured decode step; the policy plans again after a large deviation."""
        costs = self._given.costs([sequence.num_computed_tokens for sequence in decoding])
        self._slowdown += EMA * (took_s / latency_s(costs, options) - self._slowdown)
        if not 1 / REPLAN < self._slowdown / self.cost.compute.slowdown < REPLAN:
            self.cost = replace(self.cost, compute=replace(self.cost.compute, slowdown=self._slowdown))
            self.changed = True
