"""Who decodes, and where their layers lie: OrbitFlow, the systems that it is compared with, and ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kv_cache.engine import Policy, SchedulerOutput, SchedulerState, SequenceState
from kv_cache.planner.local_search import local_search
from kv_cache.planner.problem import (
    BLOCK_TOKENS,
    Offload,
    Placed,
    PlacementProblem,
    StepCosts,
    blocks_on_device,
    strides,
)

WINDOWS = (32, 64, 96, 128)  # steps that a plan may hold for
EXACT = 1 << 20  # placements, of which the best is found: four requests with drives, six without
FOREVER = 1 << 30  # until the batch changes


def _decided(
    now: SchedulerState, choose: Callable[[SchedulerState, Sequence[SequenceState]], Offload], steps: int = FOREVER
) -> SchedulerOutput:
    """The same option for all; where it does not fit, the next that takes less room; then the youngest wait."""
    running = list(now.live)
    while running:
        wanted = choose(now, running)
        costs = _costs(now, running)
        more = [Offload(n) for n in strides(now.cost.layers) if n > wanted.count]
        for option in (wanted, *more):
            if _fits(costs, [option] * len(running)):
                return SchedulerOutput(running, [option] * len(running), steps)
        running.pop()
    raise RuntimeError("no request fits the device, with every second layer away")


def deepspeed(now: SchedulerState) -> SchedulerOutput:
    """All layers lie away, the next one comes while one is computed."""
    return _decided(now, lambda now, running: Offload(now.cost.layers, buffers=2))


def flexgen(now: SchedulerState) -> SchedulerOutput:
    """Every second layer lies away, always."""
    return _decided(now, lambda now, running: Offload(now.cost.layers // 2))


def flexgen_plus(now: SchedulerState) -> SchedulerOutput:
    """As many layers as fit at the mean length of the trace, at each change of the batch."""
    return _decided(now, partial(_kept, lambda now, running: _fitting(now, running, now.mean_tokens)))


def heuristic(now: SchedulerState) -> SchedulerOutput:
    """The same at each step, for the lengths that there are."""
    until = min(BLOCK_TOKENS - each.tokens % BLOCK_TOKENS for each in now.live)  # somebody needs another block
    return _decided(now, lambda now, running: _fitting(now, running, 0.0), until)


def slo_aware(now: SchedulerState) -> SchedulerOutput:
    """As many layers away as come while the others are computed, at each change of the batch."""

    def choose(now: SchedulerState, running: Sequence[SequenceState]) -> Offload:
        costs = _costs(now, running)
        return Offload(min(now.cost.layers // 2, int(costs.compute.sum() / costs.fetch.sum())))

    return _decided(now, partial(_kept, choose))


def _kept(
    choose: Callable[[SchedulerState, Sequence[SequenceState]], Offload],
    now: SchedulerState,
    running: Sequence[SequenceState],
) -> Offload:
    """What was chosen when the batch changed last."""
    who = tuple(each.request.number for each in running)
    if now.changed or now.memory.get("who") != who:
        now.memory["who"], now.memory["option"] = who, choose(now, running)
    kept: Offload = now.memory["option"]
    return kept


def _fitting(now: SchedulerState, running: Sequence[SequenceState], least_tokens: float) -> Offload:
    """The fewest layers away, every N-th one, with which all fit at their lengths, or that length where it is more."""
    costs = now.cost.costs([max(each.tokens + 1, int(least_tokens)) for each in running])
    resident = costs.room // int(costs.blocks.sum())
    if resident >= now.cost.layers:
        return Offload(0)
    stride = max(2, now.cost.layers // (now.cost.layers - resident))
    return Offload(now.cost.layers // stride)


@dataclass(frozen=True, slots=True)
class Planner:
    """OrbitFlow's: the placement with the shortest step, until it expires; where too many tokens would be late, one
    request pauses.

    counts: how many layers may lie away. late: tokens a step that may be, over the window, less those deposited.
    pauses: whether requests do. deposits: whether tokens that are deposited count. drives: whether layers may be
    attended in drives. uniform: one count for all.
    """

    counts: Callable[[int], Sequence[int]] = strides
    late: float = 1.0
    pauses: bool = True
    deposits: bool = True
    drives: bool = False
    uniform: bool = False

    def __call__(self, now: SchedulerState) -> SchedulerOutput:
        plan: _Plan | None = now.memory.get("plan")
        if plan is None or now.changed or now.step >= plan.until or not _fits(_costs(now, plan.running), plan.options):
            plan = now.memory["plan"] = self._plan(now)
        return SchedulerOutput(plan.running, plan.options, plan.until - now.step)

    def _plan(self, now: SchedulerState) -> _Plan:
        """All of them, or without those that pause: the one with most blocks and deposited tokens first."""
        running = list(now.live)
        while True:
            found = self._placed(now, running)
            if found:
                return found
            if len(running) == 1:
                raise RuntimeError(f"a request of {running[0].tokens} tokens does not fit the device")
            running.remove(max(running, key=lambda each: each.tokens // BLOCK_TOKENS + now.deposited(each)))

    def _placed(self, now: SchedulerState, running: list[SequenceState]) -> _Plan | None:
        """The plan with the shortest step, of those the one that holds longest; None where none fits, or too much would
        be late."""
        tokens = [each.tokens + 1 for each in running]
        alone, next_one = len(running) == 1 or not self.pauses, now.cost.costs(tokens, 1)
        if not alone and self._late(now, running, next_one.least_s) > self.late:
            return None
        best = self._best(now.cost.costs(tokens, WINDOWS[0])) or self._best(next_one)
        if best is None or not (alone or self._late(now, running, best.latency_s) <= self.late):
            return None
        ends = [each for each in WINDOWS if _fits(now.cost.costs(tokens, each), best.chosen)]  # no other is shorter
        return _Plan(running, best.chosen, now.step + (ends[-1] if ends else 1))

    def _best(self, costs: StepCosts) -> Placed | None:
        """The placement with the shortest step, or near it where there are too many to find that."""
        stay = [Offload(0)] * costs.requests
        if _fits(costs, stay) and (costs.attend is None or costs.attend.min() >= 0):
            return Placed(tuple(stay), float(costs.compute.cumsum()[-1]))  # whatever is away takes longer
        options = [Offload(n) for n in self.counts(costs.layers)]
        if self.drives and costs.attend is not None:
            options += [Offload(n, in_drives=True) for n in self.counts(costs.layers) if n]
        if self.uniform:
            found = [PlacementProblem(costs, [[option]] * costs.requests).best() for option in options]
            return min((each for each in found if each), key=lambda each: each.latency_s, default=None)
        problem = PlacementProblem(costs, [options] * costs.requests)
        return problem.best() if problem.choices <= EXACT else local_search(problem)

    def _late(self, now: SchedulerState, running: Sequence[SequenceState], latency_s: float) -> float:
        """Tokens a step that are late where steps are so long, over the longest window, less those deposited."""
        if latency_s <= now.slo_s:
            return 0.0
        if not self.deposits:
            return float(len(running))
        steps = WINDOWS[-1]
        behind = steps * (1 - now.slo_s / latency_s)  # tokens that a deposit would have to give
        return sum(max(0.0, behind - now.deposited(each)) for each in running) / steps


@dataclass(frozen=True, slots=True)
class _Plan:
    running: list[SequenceState]
    options: tuple[Offload, ...]
    until: int


def _costs(now: SchedulerState, running: Sequence[SequenceState]) -> StepCosts:
    """Of the next step."""
    return now.cost.costs([each.tokens + 1 for each in running])


def _fits(costs: StepCosts, options: Sequence[Offload]) -> bool:
    return blocks_on_device(costs, options) <= costs.room


POLICIES: dict[str, Policy] = {
    "deepspeed": deepspeed,
    "flexgen": flexgen,
    "flexgen+": flexgen_plus,
    "slo-aware": slo_aware,
    "heuristic": heuristic,
    "orbitflow": Planner(),
}
