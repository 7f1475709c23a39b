"""OrbitFlow, the policies it is compared with, and ours: requests that decode, and placement of their layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_cache.hardware import CSD, DEVICE, HOST
from kv_cache.planner.local_search import local_search
from kv_cache.planner.problem import (
    BLOCK_TOKENS,
    Offload,
    PlacementProblem,
    PlacementResult,
    StepCosts,
    blocks_on_device,
    strides,
)
from kv_cache.request import SequenceState
from kv_cache.scheduler import Policy, SchedulerOutput, SchedulerState

WINDOWS = (32, 64, 96, 128)  # candidate lengths of a plan, steps
EXACT = 1 << 20  # number of placements up to which the search is exact: four requests with drives, six without
FOREVER = 1 << 30  # steps: until the batch changes


class PlacementPolicy(Policy):
    """Prefills whole prompts or chunks, and decides decode steps in `place`."""

    tiers: tuple[str, ...] = (DEVICE, HOST)
    strided = True

    def schedule(self, s: SchedulerState) -> SchedulerOutput | None:
        return s.prefill() or self.place(s)

    def place(self, s: SchedulerState) -> SchedulerOutput:
        """Requests that decode, and their offloads."""
        raise NotImplementedError


class Uniform(PlacementPolicy):
    """One offload for all requests; if it does not fit, the next smaller one on the device; then the latest wait."""

    def choose(self, s: SchedulerState, running: Sequence[SequenceState]) -> Offload:
        """Offload of these requests."""
        raise NotImplementedError

    def steps(self, s: SchedulerState) -> int:
        """Number of decode steps for which the choice holds."""
        return FOREVER

    def place(self, s: SchedulerState) -> SchedulerOutput:
        running = list(s.sequences)
        while running:
            wanted = self.choose(s, running)
            costs = _costs(s, running)
            more = [Offload(n) for n in strides(s.cost.layers) if n > wanted.count]
            for option in (wanted, *more):
                if _fits(costs, [option] * len(running)):
                    return s.output(running, [option] * len(running), self.steps(s))
            running.pop()
        raise RuntimeError(
            "no request fits on the device with every second layer offloaded: use more device memory or shorter "
            "requests"
        )


class DeepSpeed(Uniform):
    """All layers are offloaded; the next one is fetched while one is computed."""

    def choose(self, s: SchedulerState, running: Sequence[SequenceState]) -> Offload:
        return Offload(s.cost.layers, buffers=2)


class FlexGenHalf(Uniform):
    """Every second layer is offloaded, always: FlexGen as OrbitFlow compares it."""

    def choose(self, s: SchedulerState, running: Sequence[SequenceState]) -> Offload:
        return Offload(s.cost.layers // 2)


class _StickyChoice(Uniform):
    """A choice that is kept until the batch changes."""

    def __init__(self) -> None:
        self._who: tuple[int, ...] | None = None
        self._option = Offload(0)

    def choose(self, s: SchedulerState, running: Sequence[SequenceState]) -> Offload:
        who = tuple(sequence.number for sequence in running)
        if s.changed or self._who != who:
            self._who, self._option = who, self.choose_again(s, running)
        return self._option

    def choose_again(self, s: SchedulerState, running: Sequence[SequenceState]) -> Offload:
        """Choice for a changed batch."""
        raise NotImplementedError


class FlexGenPlus(_StickyChoice):
    """As many layers on the device as fit at the mean length of the trace; chosen when the batch changes."""

    def choose_again(self, s: SchedulerState, running: Sequence[SequenceState]) -> Offload:
        return _fitting(s, running, s.mean_tokens)


class SloAware(_StickyChoice):
    """As many layers offloaded as can be fetched while the others compute; chosen when the batch changes."""

    def choose_again(self, s: SchedulerState, running: Sequence[SequenceState]) -> Offload:
        costs = _costs(s, running)
        return Offload(min(s.cost.layers // 2, int(costs.compute.sum() / costs.fetch.sum())))


class Heuristic(Uniform):
    """As many layers on the device as fit at the current lengths; chosen at each step."""

    def choose(self, s: SchedulerState, running: Sequence[SequenceState]) -> Offload:
        return _fitting(s, running, 0.0)

    def steps(self, s: SchedulerState) -> int:
        return min(BLOCK_TOKENS - sequence.num_computed_tokens % BLOCK_TOKENS for sequence in s.sequences)


def _fitting(s: SchedulerState, running: Sequence[SequenceState], least_tokens: float) -> Offload:
    """Fewest offloaded layers (every N-th) with which all fit at their lengths, or at `least_tokens` if longer."""
    costs = s.cost.costs([max(sequence.num_computed_tokens + 1, int(least_tokens)) for sequence in running])
    resident = costs.room // int(costs.blocks.sum())
    if resident >= s.cost.layers:
        return Offload(0)
    stride = max(2, s.cost.layers // (s.cost.layers - resident))
    return Offload(s.cost.layers // stride)


class OrbitFlow(PlacementPolicy):
    """The placement with the shortest step, until it expires; if too many tokens would be late, one request pauses.

    Args:
        counts: Numbers of layers that may be offloaded.
        late: Late tokens per step over the window that are accepted, less those deposited.
        pauses: Whether requests may pause.
        deposits: Whether deposited tokens count.
        drives: Whether layers may be attended in drives.
        uniform: One offload for all requests.
    """

    def __init__(
        self,
        *,
        counts: Callable[[int], Sequence[int]] = strides,
        late: float = 1.0,
        pauses: bool = True,
        deposits: bool = True,
        drives: bool = False,
        uniform: bool = False,
    ) -> None:
        self.counts, self.late, self.pauses = counts, late, pauses
        self.deposits, self.drives, self.uniform = deposits, drives, uniform
        self.tiers = (DEVICE, HOST, CSD) if drives else (DEVICE, HOST)
        self._now: _Plan | None = None

    def place(self, s: SchedulerState) -> SchedulerOutput:
        plan = self._now
        if plan is None or s.changed or s.step >= plan.until or not _fits(_costs(s, plan.running), plan.options):
            plan = self._now = self._plan(s)
        return s.output(plan.running, plan.options, plan.until - s.step)

    def _plan(self, s: SchedulerState) -> _Plan:
        """Plan for all requests, or for fewer; the request with most blocks and deposited tokens pauses first."""
        running = list(s.sequences)
        while True:
            plan = self._find_plan(s, running)
            if plan:
                return plan
            if len(running) == 1:
                raise RuntimeError(
                    f"a request of {running[0].num_computed_tokens} tokens does not fit on the device: use more device "
                    "memory or a shorter request"
                )
            running.remove(
                max(running, key=lambda sequence: sequence.num_computed_tokens // BLOCK_TOKENS + s.deposited(sequence))
            )

    def _find_plan(self, s: SchedulerState, running: list[SequenceState]) -> _Plan | None:
        """Plan with the shortest step that holds longest; None if no plan fits or too many tokens would be late."""
        tokens = [sequence.num_computed_tokens + 1 for sequence in running]
        alone, next_one = len(running) == 1 or not self.pauses, s.cost.costs(tokens, 1)
        if not alone and self._late(s, running, next_one.min_latency_s) > self.late:
            return None
        best = self._best_placement(s.cost.costs(tokens, WINDOWS[0])) or self._best_placement(next_one)
        if best is None or not (alone or self._late(s, running, best.latency_s) <= self.late):
            return None
        ends = [
            window for window in WINDOWS if _fits(s.cost.costs(tokens, window), best.chosen)
        ]  # window of least latency
        return _Plan(running, best.chosen, s.step + (ends[-1] if ends else 1))

    def _best_placement(self, costs: StepCosts) -> PlacementResult | None:
        """Placement with the shortest step; approximate if there are more than `EXACT` placements."""
        stay = [Offload(0)] * costs.requests
        if _fits(costs, stay) and (costs.attend is None or costs.attend.min() >= 0):
            return PlacementResult(tuple(stay), float(costs.compute.cumsum()[-1]))  # any offload takes longer
        options = [Offload(n) for n in self.counts(costs.layers)]
        if self.drives and costs.attend is not None:
            options += [Offload(n, in_drives=True) for n in self.counts(costs.layers) if n]
        if self.uniform:
            placements = [PlacementProblem(costs, [[option]] * costs.requests).optimum() for option in options]
            return min(
                (placement for placement in placements if placement),
                key=lambda placement: placement.latency_s,
                default=None,
            )
        problem = PlacementProblem(costs, [options] * costs.requests)
        return problem.optimum() if problem.choices <= EXACT else local_search(problem)

    def _late(self, s: SchedulerState, running: Sequence[SequenceState], latency_s: float) -> float:
        """Late tokens per step of `latency_s`, over the longest window, less deposited tokens."""
        if latency_s <= s.slo_s:
            return 0.0
        steps = WINDOWS[-1]
        behind = steps * (1 - s.slo_s / latency_s)  # late tokens of a request in the window
        return sum(max(0.0, behind - self.deposits * s.deposited(sequence)) for sequence in running) / steps


@dataclass(frozen=True, slots=True)
class _Plan:
    running: list[SequenceState]
    options: tuple[Offload, ...]
    until: int


def _costs(s: SchedulerState, running: Sequence[SequenceState]) -> StepCosts:
    """Costs of the next step."""
    return s.cost.costs([sequence.num_computed_tokens + 1 for sequence in running])


def _fits(costs: StepCosts, options: Sequence[Offload]) -> bool:
    return blocks_on_device(costs, options) <= costs.room
