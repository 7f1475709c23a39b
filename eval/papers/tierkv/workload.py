"""Requests that come back: each iteration needs the KV cache of one that has waited, over a link that counts each byte.

The window is a belief of the policy: it begins the copies for the next K iterations, whether or not the link has time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from kv_cache.block_table import BlockKey, Transfer
from kv_cache.hardware import DEVICE, HOST, Machine, Route, SharedLink, Tier
from kv_cache.iteration import Iteration, IterationRunner
from kv_cache.policies.reactive import Reactive
from kv_cache.scheduler import Policy
from kv_cache.transfer.simulated import LayerTime, SimulatedTransfers

BYTES_PER_S, ROW_BYTES = 1e9, 1  # a byte is a token, and takes 1 ns
MACHINE = Machine.of(
    [Tier(DEVICE, attends=True), Tier(HOST)],
    [SharedLink("up", BYTES_PER_S)],
    {(HOST, DEVICE): Route(f"{HOST}>{DEVICE}", ("up",))},
)


class Windowed(Policy):
    """Begins copies for the next `window` iterations, the sooner due the more urgent."""

    def __init__(self, window: int) -> None:
        self.window = window
        self._came: dict[BlockKey, Transfer | None] = {}

    def layers(self, it: Iteration) -> None:
        came = self._came
        for k in range(self.window + 1):
            for block in it.blocks(0, it.plan(k)):
                if block not in came:
                    came[block] = it.copy(block, DEVICE, urgency=-it.number - k)
        it.wait(*(came.pop(block) for block in it.blocks(0)))
        it.attend(0)


@dataclass(frozen=True, slots=True)
class MeanIteration:
    """Mean milliseconds of an iteration, and the mean share of a copy that was hidden."""

    tpot_ms: float
    hits: float


def served(compute_ms: float, copies_ms: Sequence[float], window: int) -> MeanIteration:
    """Serve requests that come back one after the other, in a random order.

    Args:
        compute_ms: Compute time of an iteration.
        copies_ms: Time of each copy alone.
        window: Iterations ahead for which copies are begun; 0: each when it is missing, by the policy `reactive`.
    """
    order = list(copies_ms)
    random.Random(0).shuffle(order)
    policy = Windowed(window) if window else Reactive()
    transfers = SimulatedTransfers(MACHINE, lambda call: LayerTime(1e6 * compute_ms))
    plan = {number: (number,) for number in range(len(order))}
    runner = IterationRunner(
        MACHINE, range(1), policy.layers, transfers, parts=("kv",), plan=lambda number: plan.get(number, ())
    )
    for number, copy_ms in enumerate(order):
        runner.table.add(BlockKey(number, 0, "kv"), ROW_BYTES, HOST, round(1e6 * copy_ms))
    hidden, stalled_ns = list[float](), 0.0
    for number, copy_ms in enumerate(order):
        runner.run({number: 0}, {number: ROW_BYTES})
        waited_ns = sum(transfers.stalls_ns.values()) - stalled_ns
        stalled_ns += waited_ns
        hidden.append(max(0.0, 1 - waited_ns / (1e6 * copy_ms)) if copy_ms else 1.0)
        runner.free(number)
    return MeanIteration(fmean(transfers.iterations_ns) / 1e6, fmean(hidden))
