"""Interface of policies: the state that a policy sees before an iteration, and its decision.

Every paper is a policy here. `schedule` decides which requests run in the next iteration and the placement of their KV
caches; `layers` is the program inside the iteration. The same object runs in simulated time (`simulation.py`), with
real bytes (`vcsd.attach`) and in a server (`vcsd.serve`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from kv_cache.block_table import PolicyError
from kv_cache.cost import ServingCost
from kv_cache.hardware import CSD, DEVICE, HOST
from kv_cache.iteration import Iteration, TierAssignment, Tiers
from kv_cache.placement_runner import PlacementRunner
from kv_cache.planner.problem import Offload, offloaded_layers
from kv_cache.request import SequenceState
from kv_cache.transfer.sequences import SequenceStore

Placement = Offload | tuple[Tiers, ...]  # a strided offload, or the tiers of each layer


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """Decision about the next iteration, by request number. Requests that are not named pause.

    Attributes:
        num_scheduled_tokens: New tokens of each request: 1 in decode, more in prefill.
        placement: Placement of the KV cache of each request.
        preempted: Requests whose KV cache is dropped and prefilled again.
        num_steps: Number of decode steps for which this holds. The policy is asked earlier if requests arrive or
            finish, or if the placement no longer fits.
    """

    num_scheduled_tokens: Mapping[int, int]
    placement: Mapping[int, Placement] = field(default_factory=lambda: MappingProxyType({}))
    preempted: frozenset[int] = frozenset()
    num_steps: int = 1

    def assignment(self, layers: int) -> TierAssignment:
        """The placement, as an iteration executes it. `layers`: number of layers of the model."""
        tiers = {number: self.tiers(number, layers) for number in self.placement}
        paused: Tiers = (HOST,)

        def tiers_of(number: Any, layer: int) -> Tiers:
            return tiers[number][layer] if number in tiers else paused

        used = {blocks for layers_of in tiers.values() for blocks in layers_of}
        only = used.pop() if len(used) == 1 else ()
        return TierAssignment(tiers_of, self.buffers, tiers.keys(), only[0] if len(only) == 1 else "")

    def tiers(self, number: int, layers: int) -> tuple[Tiers, ...]:
        """Tiers of each layer of a request; host memory if it pauses without a placement."""
        placed = self.placement.get(number)
        if placed is None:
            return ((HOST,),) * layers
        if isinstance(placed, Offload):
            offloaded = set(offloaded_layers(layers, placed.count))
            there = (CSD if placed.in_drives else HOST,)
            return tuple(there if layer in offloaded else (DEVICE,) for layer in range(layers))
        return placed

    def leaves_device(self, number: int) -> bool:
        """Whether a request is placed by tiers with a layer that is not on the device."""
        placed = self.placement.get(number)
        return isinstance(placed, tuple) and any(tier != DEVICE for tiers in placed for tier in tiers)

    def buffers(self, number: Any) -> int:
        """Number of offloaded layers of a request that the device holds at once: the current one and the next."""
        placed = self.placement.get(number)
        return placed.buffers if isinstance(placed, Offload) else 2


@dataclass(frozen=True, slots=True)
class IterationResult:
    """Result of an iteration or a burst of decode steps.

    Attributes:
        took_s: Duration, seconds.
        num_steps: Decode steps.
        timed_by: `jump` (one sum), `chain` (the compiled recurrence), `events` (links and copies), or `measured`.
        finished: Requests that finished.
    """

    took_s: float
    num_steps: int
    timed_by: str
    finished: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.took_s >= 0 and self.num_steps >= 0


@dataclass(slots=True, kw_only=True)
class SchedulerState:
    """State that a policy sees before an iteration.

    Attributes:
        cost: Cost model of computation, copies and drives; memory of the device.
        sequences: Requests to decide about.
        filling: The prompt to prefill next; None: no prompt.
        chunk: Tokens of it to prefill along with a decode step; 0: a whole prompt while no request decodes.
        slo_s: Objective, seconds between tokens.
        now_s: Simulated time, seconds.
        step: Decode steps so far.
        changed: Whether sequences or limits of tiers have changed since the last decision.
        mean_tokens: Mean length of the trace's requests.
        longest_tokens: Length of the longest request, tokens; 0: unknown.
        max_batch_size: Maximum number of requests in prefill or decode.
        store: Whole sequences in tiers, for time-slicing policies.
        coming: Whether more requests will arrive.
    """

    cost: ServingCost
    sequences: Sequence[SequenceState]
    slo_s: float
    now_s: float
    step: int
    changed: bool
    mean_tokens: float = 0.0
    filling: SequenceState | None = None
    chunk: int = 0
    longest_tokens: int = 0
    max_batch_size: int = 1
    store: SequenceStore | None = None
    coming: bool = False

    def deposited(self, sequence: SequenceState) -> int:
        """Number of tokens produced but not delivered yet; one is delivered per interval of the objective."""
        while sequence.deposit:
            delivered_s = sequence.delivered_s
            leaves = max(sequence.deposit[0], delivered_s + self.slo_s if delivered_s else 0.0)
            if leaves > self.now_s:
                break
            sequence.deposit.popleft()
            sequence.delivered_s = leaves
        return len(sequence.deposit)

    def prefill(self, placement: Placement = Offload(0)) -> SchedulerOutput | None:
        """Iteration that prefills a whole prompt; None if there is no prompt or it is prefilled in chunks."""
        filling = self.filling
        if filling is None or (self.chunk and self.sequences):
            return None
        tokens = {filling.number: filling.num_missing_tokens}
        return SchedulerOutput(num_scheduled_tokens=tokens, placement={filling.number: placement})

    def output(
        self,
        running: Sequence[SequenceState],
        placement: Iterable[Placement],
        num_steps: int = 1,
        filling: Placement = Offload(0),
    ) -> SchedulerOutput:
        """A decode step of `running` with a placement for each, plus the next chunk of a prompt (`filling`)."""
        tokens = dict.fromkeys((sequence.number for sequence in running), 1)
        placed = dict(zip(tokens, placement, strict=True))
        if self.filling is not None and self.chunk:
            tokens[self.filling.number] = min(self.chunk, self.filling.num_missing_tokens)
            placed[self.filling.number] = filling
        return SchedulerOutput(num_scheduled_tokens=tokens, placement=placed, num_steps=num_steps)

    def run_all(self) -> SchedulerOutput:
        """Prefill a prompt, or decode all requests with the placement left to `Policy.layers`."""
        here = ((DEVICE,),) * self.cost.layers
        return self.prefill() or self.output(self.sequences, [here] * len(self.sequences))


class Policy:
    """Base of all policies: decides which requests run, and the placement of their KV caches. It runs all requests.

    A policy keeps its state in itself: each engine has its own instance.

    Attributes:
        tiers: Tiers that it needs.
        admits: Whether it admits requests itself: it then sees all that have arrived, prefilled or not.
        strided: Whether each placement is an `Offload`. Iterations are then timed by the compiled chain, in which a
            change of placement costs nothing; otherwise by events.
        why: Reason of a choice that it made, for reports.
    """

    tiers: tuple[str, ...] = ()
    admits: bool = False
    strided: bool = False
    why: str = ""

    def schedule(self, s: SchedulerState) -> SchedulerOutput | None:
        """Decide the next iteration; None if no request can run until one arrives or a copy ends."""
        return s.run_all()

    def layers(self, it: Iteration) -> None:
        """Program of an iteration: copies, and attention in each layer; by default it executes the placement."""
        PlacementRunner(it).run()

    def update(self, output: SchedulerOutput, result: IterationResult) -> None:
        """Called after each iteration."""

    def forget(self, number: int) -> None:
        """Called when a request has finished or was cancelled."""

    @property
    def name(self) -> str:
        """Name in error messages."""
        return type(self).__name__

    @property
    def has_layers(self) -> bool:
        """Whether it has its own program of an iteration."""
        return type(self).layers is not Policy.layers

    @staticmethod
    def of(definition: Any) -> Policy:
        """A policy, or one created from its class or a `partial` of it; raises ValueError for anything else."""
        is_maker = isinstance(definition, type) or (
            isinstance(definition, partial) and isinstance(definition.func, type)
        )
        instance = definition() if is_maker else definition
        if not isinstance(instance, Policy):
            raise ValueError(f"{definition!r} is not a policy: derive its class from kv_cache.Policy")
        return instance


def check_output(policy: Policy, output: Any, here: Sequence[SequenceState], layers: int) -> None:
    """Check a policy's decision.

    Args:
        policy: The policy.
        output: Result of `schedule`.
        here: Admitted requests.
        layers: Number of layers of the model.

    Raises:
        PolicyError: It names unknown requests or schedules none, or it is not a `SchedulerOutput`.
    """
    who, there = f"policy {policy.name}", {sequence.number: sequence for sequence in here}
    if not isinstance(output, SchedulerOutput):
        raise PolicyError(f"{who}: schedule returned {output!r}: must be a SchedulerOutput, or None to wait")
    for number, count in output.num_scheduled_tokens.items():
        if number not in there:
            raise PolicyError(f"{who}: it schedules request {number}, which is not admitted")
        most = there[number].num_missing_tokens
        if not 1 <= count <= most:
            raise PolicyError(f"{who}: {count} tokens for request {number}: must be 1 to {most}")
        placed = output.placement.get(number)
        if isinstance(placed, Offload) and placed.count > layers:
            raise PolicyError(f"{who}: {placed.count} layers are offloaded, the model has {layers}")
    if not output.num_scheduled_tokens:
        raise PolicyError(f"{who}: it schedules no request: return None to wait")


def check_host(
    name: str, options: Sequence[Offload], tokens: Sequence[int], token_bytes: float, host_bytes: float
) -> None:
    """Check that host memory holds the layers that are offloaded to it.

    Args:
        name: Name of the policy.
        options: Offload of each request, (R,).
        tokens: Cached tokens of each request, (R,).
        token_bytes: Bytes of the KV cache per token and layer.
        host_bytes: Bytes of host memory.

    Raises:
        PolicyError: Host memory is too small.
    """
    offloaded = sum(option.count * held for option, held in zip(options, tokens, strict=True) if not option.in_drives)
    if offloaded * token_bytes > host_bytes:
        raise PolicyError(
            f"policy {name}: host memory is full: {offloaded * token_bytes:,.0f} bytes are offloaded, it has "
            f"{host_bytes:,.0f}"
        )
