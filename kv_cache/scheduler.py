"""The interface of policies: the state that a policy sees before an iteration, and its decision.

Every paper is a policy here. `schedule` decides who runs in the next iteration and where the KV cache of each request
lies; `layers` is the program inside the iteration. The same object runs in modelled time (`engine.py: simulate`), with
real bytes (`vcsd.attach`) and in a server (`vcsd.serve`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from kv_cache.block_table import PolicyError
from kv_cache.carry_out import carry_out
from kv_cache.cost import ServingCost
from kv_cache.hardware import CSD, DEVICE, HOST
from kv_cache.iteration import Iteration
from kv_cache.planner.problem import Offload, away
from kv_cache.request import SequenceState
from kv_cache.transfer.sequences import SequenceStore

Tiers = tuple[str, ...]  # of each block of a layer
Placement = Offload | tuple[Tiers, ...]  # a strided offload, or the tiers of each layer


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """What the next iteration does, by the requests' numbers. Requests that are not named pause.

    Attributes:
        num_scheduled_tokens: New tokens of each request: one decodes, more prefill.
        placement: Where the KV cache of each request lies.
        preempted: Requests whose KV cache is given up; it is prefilled again.
        num_steps: Decode steps for which this holds. The policy is asked earlier if requests come or end, or if the
            placement no longer fits.
    """

    num_scheduled_tokens: Mapping[int, int]
    placement: Mapping[int, Placement] = field(default_factory=lambda: MappingProxyType({}))
    preempted: frozenset[int] = frozenset()
    num_steps: int = 1

    def tiers(self, number: int, layers: int, first_block: bool = False) -> tuple[Tiers, ...]:
        """The tiers of each layer of a request; host memory if it pauses and no placement is given.

        Args:
            number: The request's.
            layers: Layers of the model.
            first_block: Whether the first tokens of layers in drives are a block on the device.
        """
        placed = self.placement.get(number)
        if placed is None:
            return ((HOST,),) * layers
        if isinstance(placed, Offload):
            offloaded = set(away(layers, placed.count))
            there = ((DEVICE, CSD) if first_block else (CSD,)) if placed.in_drives else (HOST,)
            return tuple(there if layer in offloaded else (DEVICE,) for layer in range(layers))
        return placed

    def leaves_device(self, number: int) -> bool:
        """Whether a request is placed by tiers, and some layer of it is not on the device."""
        placed = self.placement.get(number)
        return isinstance(placed, tuple) and any(tier != DEVICE for tiers in placed for tier in tiers)

    def buffers(self, number: int) -> int:
        """Layers of a request that the device holds at once of those that lie elsewhere: this one, and the next."""
        placed = self.placement.get(number)
        return placed.buffers if isinstance(placed, Offload) else 2


@dataclass(frozen=True, slots=True)
class IterationResult:
    """How an iteration, or a burst of decode steps, went.

    Attributes:
        took_s: Seconds of it.
        num_steps: Decode steps.
        timed_by: `jump` (one sum), `chain` (the compiled recurrence), `events` (links and copies), or `measured`.
        finished: Requests that have ended by it.
    """

    took_s: float
    num_steps: int
    timed_by: str
    finished: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class SchedulerState:
    """What a policy sees before an iteration.

    Attributes:
        cost: Seconds of compute, of copies and of drives; the room on the device.
        sequences: Requests to decide about.
        filling: The prompt that is prefilled next; None if there is none.
        chunk: Tokens of it that are prefilled beside a decode step; 0: a whole prompt, while nobody decodes.
        slo_s: Seconds between tokens that are the objective.
        now_s: Modelled time.
        step: Decode steps so far.
        changed: Whether sequences came or went, or limits of tiers changed, since the policy was asked last.
        mean_tokens: Mean length of the trace's requests.
        first_block: Tokens of a prompt that are computed first, as a block of their own; 0: there is no such block.
        store: Whole sequences in tiers, for policies that take turns.
        coming: Whether requests are still to arrive.
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
    first_block: int = 0
    store: SequenceStore | None = None
    coming: bool = False

    def deposited(self, sequence: SequenceState) -> int:
        """Tokens made and not delivered yet: one is delivered in each interval of the objective."""
        while sequence.deposit:
            delivered_s = sequence.delivered_s
            leaves = max(sequence.deposit[0], delivered_s + self.slo_s if delivered_s else 0.0)
            if leaves > self.now_s:
                break
            sequence.deposit.popleft()
            sequence.delivered_s = leaves
        return len(sequence.deposit)

    def prefill(self) -> SchedulerOutput | None:
        """The iteration that prefills all of a prompt; None if there is none, or if it goes beside decode steps."""
        if self.filling is None or (self.chunk and self.sequences):
            return None
        filling = self.filling
        return SchedulerOutput(
            num_scheduled_tokens={filling.number: self._next(filling, filling.num_missing_tokens)},
            placement={filling.number: Offload(0)},
        )

    def _next(self, filling: SequenceState, most: int) -> int:
        """Tokens of a prompt to compute now."""
        missing = filling.num_missing_tokens
        if self.first_block and not filling.num_computed_tokens:
            return min(self.first_block, missing - 1) or missing
        return min(most, missing)

    def output(
        self, running: Sequence[SequenceState], placement: Iterable[Placement], num_steps: int = 1
    ) -> SchedulerOutput:
        """A decode step of `running`, each with its placement, and the next chunk of a prompt beside it."""
        tokens = dict.fromkeys((each.number for each in running), 1)
        placed = dict(zip(tokens, placement, strict=True))
        if self.filling is not None and (count := self._next(self.filling, self.chunk)):
            tokens[self.filling.number] = count
            placed[self.filling.number] = Offload(0)
        return SchedulerOutput(num_scheduled_tokens=tokens, placement=placed, num_steps=num_steps)

    def run_all(self) -> SchedulerOutput:
        """The prefill of a prompt, or a decode step of everybody with the KV cache where `Policy.layers` leaves it."""
        here = ((DEVICE,),) * self.cost.layers
        return self.prefill() or self.output(self.sequences, [here] * len(self.sequences))


class Policy:
    """Who runs, and where the KV cache lies: the base of all policies, which runs everybody.

    Any object with these members is one. A policy keeps what it remembers on itself: each engine has its own.

    Attributes:
        tiers: Tiers that it needs.
        admits: Whether it lets requests in itself: it then sees all that have arrived, prefilled or not.
        first_block: Whether the first tokens of layers in drives stay on the device, as a block of their own.
        strided: Whether each placement is an `Offload`. Modelled time is then that of the compiled chain, in which a
            change of placement costs nothing; else iterations are timed by events.
    """

    tiers: tuple[str, ...] = ()
    admits: bool = False
    first_block: bool = False
    strided: bool = False

    def schedule(self, s: SchedulerState) -> SchedulerOutput | None:
        """The next iteration; None if nobody can run until a request arrives or a copy ends."""
        return s.run_all()

    def layers(self, it: Iteration) -> None:
        """The program of an iteration: copies, and attention to each layer; by default what the placement says."""
        carry_out(it)

    def update(self, output: SchedulerOutput, result: IterationResult) -> None:
        """An iteration is over."""

    def forget(self, number: int) -> None:
        """A request has ended, or is not wanted any more."""

    @property
    def name(self) -> str:
        """Name in error messages."""
        return type(self).__name__

    @property
    def has_layers(self) -> bool:
        """Whether it has a program of its own for the inside of an iteration."""
        return type(self).layers is not Policy.layers

    @staticmethod
    def of(given: Any) -> Policy:
        """A policy of an object with members of `Policy`, of its class, or of a function of an `Iteration`.

        Raises:
            ValueError: It is none of these.
        """
        is_maker = isinstance(given, type) or (isinstance(given, partial) and isinstance(given.func, type))
        made = given() if is_maker else given
        if isinstance(made, Policy):
            return made
        if hasattr(made, "schedule") or hasattr(made, "layers"):
            return _Adapted(made)
        if callable(made):
            return LayerPolicy(made)
        raise ValueError(
            f"{given!r} is no policy: it needs `schedule` or `layers`, or must be a function of an Iteration"
        )


def check_output(policy: Policy, output: Any, here: Sequence[SequenceState], layers: int) -> None:
    """Check a policy's decision.

    Args:
        policy: Its own.
        output: What `schedule` returned.
        here: Requests that were admitted.
        layers: Layers of the model.

    Raises:
        PolicyError: It is about requests that are not there, or lets nobody run; or it is no decision.
    """
    who, there = f"policy {policy.name}", {each.number: each for each in here}
    if not isinstance(output, SchedulerOutput):
        raise PolicyError(f"{who}: schedule returned {output!r}, which is no SchedulerOutput")
    for number, count in output.num_scheduled_tokens.items():
        if number not in there:
            raise PolicyError(f"{who}: it schedules request {number}, which is not there")
        most = there[number].num_missing_tokens
        if not 1 <= count <= most:
            raise PolicyError(f"{who}: {count} tokens for request {number}, which has {most} to compute")
        placed = output.placement.get(number)
        if isinstance(placed, Offload) and placed.count > layers:
            raise PolicyError(f"{who}: {placed.count} layers are offloaded, the model has {layers}")
    if not output.num_scheduled_tokens:
        raise PolicyError(f"{who}: it schedules nobody; None lets all wait")


def check_host(
    name: str, options: Sequence[Offload], tokens: Sequence[int], token_bytes: float, host_bytes: float
) -> None:
    """Check that host memory holds the layers that are offloaded to it.

    Args:
        name: The policy's.
        options: Offload of each request, (R,).
        tokens: Cached tokens of each request, (R,).
        token_bytes: Bytes of the KV cache per token and layer.
        host_bytes: Bytes of host memory.

    Raises:
        PolicyError: Host memory is too small.
    """
    offloaded = sum(each.count * held for each, held in zip(options, tokens, strict=True) if not each.in_drives)
    if offloaded * token_bytes > host_bytes:
        raise PolicyError(
            f"policy {name}: host memory is full: {offloaded * token_bytes:,.0f} bytes are offloaded, it has "
            f"{host_bytes:,.0f}"
        )


class LayerPolicy(Policy):
    """A function of an `Iteration` as a policy that runs everybody."""

    def __init__(self, function: Callable[[Iteration], None], tiers: tuple[str, ...] = ()) -> None:
        self.function, self.tiers = function, tiers

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", "policy")

    def layers(self, it: Iteration) -> None:
        self.function(it)


class _Adapted(Policy):
    """An object that has some of the members, without the base class."""

    def __init__(self, given: Any) -> None:
        self.given = given
        for name in ("tiers", "admits", "first_block", "strided", "schedule", "layers", "update", "forget"):
            if hasattr(given, name):
                setattr(self, name, getattr(given, name))

    @property
    def name(self) -> str:
        return type(self.given).__name__

    @property
    def has_layers(self) -> bool:
        return hasattr(self.given, "layers")
