"""One decode step of one layer as arrays, and the result of a published method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from csd_spec.arrays import F32

T = TypeVar("T")
VALUE_BYTES = 2  # an FP16 number: an element of a key or value, or a scale


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
        kept: Values that methods made from the prompt, for the following steps.
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
        """Bytes of all keys and values in FP16."""
        return 2 * VALUE_BYTES * self.k.size

    def once(self, name: str, make: Callable[[], T]) -> T:
        """A value made from the prompt at the first step: codes, an index, evicted tokens."""
        if name not in self.kept:
            self.kept[name] = make()
        made: T = self.kept[name]
        return made


@dataclass(frozen=True, slots=True)
class StreamOutput:
    """Result of a method.

    Attributes:
        out: Attention output, (N, G, d).
        nbytes: Bytes of codes, scales, indices, keys and values that the step reads, of all streams.
        attended: Tokens that are in the output by themselves, in any precision: (N, S), or (N, G, S) where each
            query head chooses.
    """

    out: F32
    nbytes: float
    attended: NDArray[np.bool_]


Method = Callable[[Streams, float], StreamOutput]  # a step, and the share of `dense_bytes` that it may read


@dataclass(frozen=True, slots=True)
class Published:
    """A method of another paper.

    Attributes:
        method: The function.
        source: Where its equations are from.
        budgeted: Whether it respects a budget. Otherwise its format determines the bytes.
    """

    method: Method
    source: str
    budgeted: bool = True


def softmax(logits: F32) -> F32:
    """Weights along the last axis; -inf is 0."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    made: F32 = weights / weights.sum(-1, keepdims=True)
    return made
