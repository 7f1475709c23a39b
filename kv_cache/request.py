"""State of a request while it is served."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from csd_spec.arrays import F64
from kv_cache.trace import Request


@dataclass(slots=True, eq=False)
class SequenceState:
    """An admitted request and its tokens so far.

    Attributes:
        request: The request.
        arrived_s: Arrival, seconds, for traces in steps too.
        bursts: Pairs of arrays: times at which tokens were produced, and the seconds of the step of each (for a first
            token, of its prefill).
        num_output_tokens: Output tokens so far.
        num_computed_tokens: Tokens whose KV data is stored.
        deposit: Production times of tokens that are not delivered yet.
        delivered_s: Delivery of the last token that left the deposit, seconds.
        entered_s: Start of its prefill, seconds.
        paused: Steps since its last decode step.
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
        """Prompt and output tokens."""
        return self.request.input_tokens + self.num_output_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Tokens to compute before the next output token: 1 in decode."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def prefills(self) -> bool:
        """Whether its prompt, or a dropped KV cache, still has to be computed."""
        return self.num_missing_tokens > 1 or not self.num_output_tokens

    @property
    def finished(self) -> bool:
        return self.num_output_tokens == self.request.output_tokens

    @property
    def token_times_s(self) -> F64:
        return np.concatenate([ends for ends, _ in self.bursts])

    @property
    def step_s(self) -> F64:
        return np.concatenate([took for _, took in self.bursts])

    def add_tokens(self, ends: F64, took: F64) -> None:
        """Record tokens produced by steps that ended at `ends` and took `took` seconds, (steps,) each."""
        assert ends.size == took.size > 0 and not self.finished
        assert not self.bursts or self.bursts[-1][0][-1] <= ends[0], f"request {self.number}: a token before the last"
        self.bursts.append((ends, took))
        self.num_output_tokens += ends.size
        assert self.num_output_tokens <= self.request.output_tokens, f"request {self.number}: too many tokens"
        self.num_computed_tokens = self.num_tokens - 1
        self.deposit.extend(ends.tolist())

    def add_computed(self, tokens: int) -> None:
        """Record tokens whose KV data is stored now."""
        assert 0 < tokens <= self.num_missing_tokens, f"request {self.number}: {tokens} tokens computed"
        self.num_computed_tokens += tokens
