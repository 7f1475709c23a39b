"""Sequences that a driver created together, and the parts of them that run through a decode step."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from csd_spec import AttentionConfig, Completion
from csd_spec.arrays import I64, U64
from host_driver.command_order import CommandOrder


@dataclass(slots=True, eq=False)
class Batch:
    """Sequences created together: handles by drive, and stored tokens per sequence and layer, (B, layers)."""

    handles: list[U64]
    lengths: I64


@dataclass(slots=True)
class MicroBatch:
    """A part of a batch in a decode step: its simulated time, and its place in the order of submissions."""

    now_ns: int
    breakdown_ns: Counter[str] = field(default_factory=Counter)
    order: CommandOrder | None = None
    number: int = 0
    _params: tuple[tuple[AttentionConfig, list[int]], tuple[int, I64, I64]] | None = None

    def params(self, attention: AttentionConfig, lengths: I64, head_dim: int) -> tuple[int, I64, I64]:
        """r, and k and l of each sequence, for `lengths` tokens; cached, since most layers of a step share them."""
        counts = lengths.tolist()
        if self._params is None or self._params[0] != (attention, counts):
            by_length = {length: attention.at(length, head_dim) for length in set(counts)}
            configs = [by_length[length] for length in counts]
            params = (
                configs[0].r,
                np.array([config.k for config in configs]),
                np.array([config.l for config in configs]),
            )
            self._params = (attention, counts), params
        return self._params[1]

    def turn(self) -> AbstractContextManager[None]:
        """Context in which this micro-batch may submit."""
        return self.order.turn(self.number) if self.order else nullcontext()

    def leave(self, failed: bool) -> None:
        """Report that this micro-batch has finished or failed, so that others do not wait for it."""
        if self.order:
            self.order.leave(self.number, failed)


class StepObserver(Protocol):
    """Receives the layers of each decode step in simulated time."""

    def begin_step(self, now_ns: int) -> None:
        """A step begins."""

    def end_layer(self, number: int, layer: int, began_ns: int, done: list[Completion]) -> None:
        """A layer of micro-batch `number` ends; `done`: completion of each drive."""

    def end_step(self, now_ns: int) -> None:
        """The step ends."""
