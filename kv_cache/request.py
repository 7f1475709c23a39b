"""A request while it is served."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from csd_spec.arrays import F64
from kv_cache.trace import Request


@dataclass(slots=True, eq=False)
class SequenceState:
    """A request that was admitted, and its tokens so far.

    Attributes:
        request: The request.
        arrived_s: Arrival in seconds, whatever unit the trace has.
        bursts: Pairs of arrays: when tokens were made, and the seconds of the step that made each; for a first token
            the seconds of its prefill.
        num_output_tokens: Tokens made.
        num_computed_tokens: Tokens whose K and V are stored.
        deposit: When each token was made that is not delivered yet.
        delivered_s: When the last token left the deposit.
        entered_s: When its prefill began.
        paused: Steps since it decoded.
    """

    request: Request
    arrived_s: float
    bursts: list[tuple[F64, F64]] = field(default_factory=list)
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    deposit: deque[float] = field(default_factory=deque)
    delivered_s: float = 0.0
    entered_s: float = 0.0
    paused: int = 0

    @property
    def number(self) -> int:
        """The request's number."""
        return self.request.number

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and those made."""
        return self.request.input_tokens + self.num_output_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Tokens to compute before the next one is made: 1 in decode."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def prefills(self) -> bool:
        """Whether its prompt, or what was given up of its KV cache, is still to be computed."""
        return self.num_missing_tokens > 1 or not self.num_output_tokens

    @property
    def finished(self) -> bool:
        return self.num_output_tokens == self.request.output_tokens

    @property
    def made_s(self) -> F64:
        return np.concatenate([ends for ends, _ in self.bursts])

    @property
    def step_s(self) -> F64:
        return np.concatenate([took for _, took in self.bursts])

    def made(self, ends: F64, took: F64) -> None:
        """Tokens were made by steps that ended at `ends` and took `took` seconds, (steps,) each."""
        self.bursts.append((ends, took))
        self.num_output_tokens += ends.size
        self.num_computed_tokens = self.num_tokens - 1
        self.deposit.extend(ends.tolist())
