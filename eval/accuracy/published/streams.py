"""One decode step of one layer as arrays, and what a published method makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from csd_spec.arrays import F32

T = TypeVar("T")
VALUE_BYTES = 2  # of K and V in FP16, scales included


@dataclass(frozen=True, slots=True)
class Streams:
    """One decode step of one layer.

    Attributes:
        q: Queries of the step, (N, G, d): N KV heads of all sequences, G query heads on each, positions encoded.
        k: Keys, (N, S, d), the values that FP16 holds.
        v: Values, (N, S, d), the same.
        prompt: How many of the S tokens were there when decoding began. The others are recent: no method has coded
            or evicted them yet, and they are read in FP16.
        prompt_q: The prompt's last queries, (N, G, W, d), for methods that judge tokens by them.
        kept: What methods have made of the prompt, for the steps that follow.
    """

    q: F32
    k: F32
    v: F32
    prompt: int
    prompt_q: F32
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(N, G, S, d)."""
        return (*self.q.shape[:2], *self.k.shape[1:])

    @property
    def dense_bytes(self) -> int:
        """Bytes of K and V of all tokens in FP16."""
        return 2 * VALUE_BYTES * self.k.size

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What was made of the prompt at the first step: codes, indices, who is evicted."""
        if name not in self.kept:
            self.kept[name] = make()
        made: T = self.kept[name]
        return made


@dataclass(frozen=True, slots=True)
class Answer:
    """What a method returns.

    Attributes:
        out: Attention output, (N, G, d).
        nbytes: Bytes of codes, scales, indices, keys and values that the step reads, of all streams.
        attended: Tokens that are in the output by themselves, in whichever precision: (N, S), or (N, G, S) where each
            query head chooses.
    """

    out: F32
    nbytes: float
    attended: NDArray[np.bool_]


Method = Callable[[Streams, float], Answer]  # a step, and the share of `dense_bytes` that it may read


@dataclass(frozen=True, slots=True)
class Published:
    """A method of another paper.

    Attributes:
        method: What it does.
        source: Where its equations are from.
        budgeted: Whether it heeds a budget. Otherwise it reads what its format has, whatever is asked.
    """

    method: Method
    source: str
    budgeted: bool = True


def softmax(logits: F32) -> F32:
    """Weights along the last axis; -inf is 0."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    made: F32 = weights / weights.sum(-1, keepdims=True)
    return made
