"""Policies for requests that come while others are served: who does what in the next iteration, and what lies where.

A policy's clock is that of its own machine, in modelled time: so the same requests get the same decisions on every day.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from kv_cache.cost import ServingCost
from kv_cache.engine import Policy, SchedulerState, SequenceState
from kv_cache.hardware import CSD, DEVICE, DIRECT, HOST
from kv_cache.planner.problem import Offload, PlacementProblem, away
from kv_cache.tiered.machine import Machine, Tier
from kv_cache.tiered.run import check, decide, open_server, waiting
from kv_cache.tiered.server import NothingMoves
from kv_cache.tiered.server import Policy as TieredPolicy
from kv_cache.tiered.store import Kv
from kv_cache.trace import Request

Homes = Sequence[tuple[str, ...]]  # of each layer, the places of a request's blocks
PATIENCE = 64  # iterations that a request may be passed over
PARTED, EMA = 1.25, 0.1  # measured over predicted, beyond which plans are made again; of the newest step
PLACES = {Tier.DEVICE: DEVICE, Tier.HOST: HOST, Tier.FLASH: DIRECT}


@dataclass(frozen=True, slots=True)
class Choice:
    """What the next iteration does. By the requests' numbers.

    entering: who is prefilled, or once more after its K and V were given up. running: who decodes; those that enter are
    among them, and make their first token by prefill. homes: of everyone who has K and V. head: tokens of a prompt's
    first block, where rows have two.
    """

    entering: tuple[int, ...]
    running: tuple[int, ...]
    homes: Mapping[int, Homes]
    head: int = 0


class Scheduler(Protocol):
    """Decides for a server."""

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that there never is room for."""
        ...

    def add(self, request: Request) -> None:
        """A request waits."""
        ...

    def remove(self, number: int) -> None:
        """A request has ended, wherever it was."""
        ...

    def next(self) -> Choice | None:
        """None where nobody is there."""
        ...

    def made(self, numbers: Collection[int], took_s: float | None = None) -> None:
        """The iteration is over, in which these requests made a token. took_s: of those that decoded, where it was
        measured."""
        ...


class Slots:
    """Slots, and a policy that is asked who of those in them decodes and where their layers lie.

    head: tokens of a row that stay on the device where the policy has it in drives. now_s: modelled. Where steps are
    measured and part from what was predicted, the engine is taken to be slower, or faster, and the policy plans again.
    """

    def __init__(self, policy: Policy, cost: ServingCost, slo_s: float, slots: int = 4, head: int = 0) -> None:
        self.policy, self.cost, self.slo_s, self.slots, self.head = policy, cost, slo_s, slots, head
        self.now_s, self.live = 0.0, list[SequenceState]()
        self._queue = deque[SequenceState]()
        self._passed_over = Counter[int]()
        self._memory: dict[str, Any] = {}
        self._asked: tuple[int, ...] = ()
        self._running: dict[int, Offload] = {}
        self._steps = self._count = self._tokens = 0
        self._given, self._slower, self._replan = cost, 1.0, False

    def check(self, request: Request) -> None:
        self.cost.check([request])

    def add(self, request: Request) -> None:
        self._queue.append(SequenceState(request, self.now_s))
        self._count += 1
        self._tokens += request.tokens

    def remove(self, number: int) -> None:
        self.live = [each for each in self.live if each.request.number != number]
        self._queue = deque(each for each in self._queue if each.request.number != number)
        self._passed_over.pop(number, None)

    def next(self) -> Choice | None:
        entering: tuple[int, ...] = ()
        if self._queue and len(self.live) < self.slots:  # one: its prefill keeps all others waiting
            self.live.append(self._queue.popleft())
            entering = (self.live[-1].request.number,)
        if not self.live:
            return None
        running = self._running = self._ask()
        homes = {each.request.number: self._homes(running.get(each.request.number)) for each in self.live}
        return Choice(entering, tuple(running), homes, self.head)

    def made(self, numbers: Collection[int], took_s: float | None = None) -> None:
        ran = [each for each in self.live if each.request.number in numbers]
        if took_s is not None:
            self._compare([each for each in ran if each.count], took_s)
        decoded = [each.tokens for each in ran if each.count]
        passed_s = self.cost.compute.decode_s(len(decoded), sum(decoded)) if decoded else 0.0
        passed_s += sum(self.cost.compute.prefill_s(each.request.input_tokens) for each in ran if not each.count)
        self.now_s += passed_s
        self._steps += 1
        for each in self.live:
            self._passed_over[each.request.number] += each.count > 0  # who is prefilled waits for nobody
        for each in ran:
            self._passed_over[each.request.number] = 0
            each.made(np.array([self.now_s]), np.array([passed_s]))

    def _compare(self, ran: Sequence[SequenceState], took_s: float) -> None:
        """What a step took, with what the plan says that it takes."""
        options = [[self._running[each.request.number]] for each in ran]
        planned = (
            PlacementProblem(self._given.costs([each.tokens + 1 for each in ran]), options).best() if ran else None
        )
        if planned is None:
            return
        self._slower += EMA * (took_s / planned.latency_s - self._slower)
        if not 1 / PARTED < self._slower / self.cost.compute.slowdown < PARTED:
            self.cost, self._replan = (
                replace(self.cost, compute=replace(self.cost.compute, slowdown=self._slower)),
                True,
            )

    def _ask(self) -> dict[int, Offload]:
        """Who decodes, and how their layers lie. Who was passed over too often is asked about alone."""
        starved = [each for each in self.live if self._passed_over[each.request.number] >= PATIENCE]
        among = starved or self.live
        who = tuple(each.request.number for each in among)
        changed, self._asked, mean = self._replan or who != self._asked, who, self._tokens / self._count
        self._replan = False
        now = SchedulerState(self.cost, among, self.slo_s, self.now_s, self._steps, changed, mean, self._memory)
        decision = self.policy(now)
        return {each.request.number: option for each, option in zip(decision.running, decision.options, strict=True)}

    def _homes(self, option: Offload | None) -> Homes:
        """Of a request: None where it pauses."""
        layers = self.cost.layers
        if option is None:
            return [(HOST,)] * layers
        lie = set(away(layers, option.count))
        drives = (DEVICE, CSD) if self.head else (CSD,)
        return [(drives if option.in_drives else (HOST,)) if layer in lie else (DEVICE,) for layer in range(layers)]


class Slices:
    """Time slices: more requests than fit the device take turns, and move between tiers as a whole."""

    def __init__(
        self, policy: TieredPolicy, machine: Machine, layers: int, slice_tokens: int, longest_tokens: int
    ) -> None:
        self.machine, self._layers = machine, layers
        self._server = open_server(machine, policy, slice_tokens, machine.bytes_of(longest_tokens + 1))
        self._kvs: dict[int, Kv] = {}
        self._prefilled: list[int] = []

    def check(self, request: Request) -> None:
        check([request], self.machine)

    def add(self, request: Request) -> None:
        kv = self._kvs[request.number] = waiting(request, self.machine, self._server.store.now_s)
        self._server.queue.append(kv)

    def remove(self, number: int) -> None:
        if (kv := self._kvs.pop(number, None)) is not None:
            self._server.withdraw(kv)

    def next(self) -> Choice | None:
        if not self._kvs:
            return None
        server = self._server
        self._decide()
        while not server.active:
            if not server.store.step():
                self._give_up()
            self._decide()
        entering = [kv for kv in server.active if kv.absent]
        self._prefilled = [kv.tokens for kv in entering]
        for kv in entering:
            kv.absent = False
        homes = {number: self._homes(kv) for number, kv in self._kvs.items() if not kv.absent}
        return Choice(_numbers(entering), _numbers(server.active), homes)

    def made(self, numbers: Collection[int], took_s: float | None = None) -> None:
        ran = [self._kvs[number] for number in numbers]
        self._server.iterated(self.machine.iteration_s([kv.tokens for kv in ran], self._prefilled))
        for kv in ran:
            kv.grow()

    def _decide(self) -> None:
        """Ask the policy; where copies wait for each other's room, somebody's K and V are given up."""
        while True:
            try:
                return decide(self._server)
            except NothingMoves:
                self._give_up()

    def _give_up(self) -> None:
        """Have K and V of the last one that waits computed again, when it has its turn."""
        waiting = [kv for kv in reversed(self._server.queue) if kv.move or kv.tier is not None]
        if not waiting:
            raise NothingMoves
        self._server.store.withdraw(waiting[0])
        waiting[0].absent = True

    def _homes(self, kv: Kv) -> Homes:
        tier = kv.move.to if kv.move else kv.tier
        return [(PLACES[tier or Tier.DEVICE],)] * self._layers


def _numbers(kvs: Sequence[Kv]) -> tuple[int, ...]:
    return tuple(kv.request.number for kv in kvs)
