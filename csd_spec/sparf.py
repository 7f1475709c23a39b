"""SparF's parameters, and the budgets from which they follow at every step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from csd_spec._bounds import at_least

BudgetConvention = Literal["paper", "bytes"]


@dataclass(frozen=True, slots=True)
class SparFParams:
    """Selection of one step: r channels, k tokens, of which the l most recent are always kept (Algorithm 1)."""

    r: int
    k: int
    l: int  # noqa: E741 - the paper's name

    def __post_init__(self) -> None:
        at_least(1, r=self.r, k=self.k)
        at_least(0, l=self.l)
        if self.l > self.k:
            raise ValueError(f"l = {self.l}: must be at most k = {self.k}, which includes the recent tokens")


@runtime_checkable
class SparsityBudget(Protocol):
    """Rule for the part of the KV cache that a decode step may use, depending on the sequence length."""

    def at(self, seq_len: int, head_dim: int) -> SparFParams:
        """Return the parameters for `seq_len` stored tokens of `head_dim` channels."""
        ...


@dataclass(frozen=True, slots=True)
class CompressionBudget:
    """A fraction 1/c of the KV cache; c = 1 is dense.

    `paper`: k = ceil(S / c), which moves 1.5/c of the dense bytes. `bytes`: k = ceil(S / 2c), so that
    r/(2d) + k/S = 1/c, as in SparQ. Both: r = max(1, floor(d / c)), l = ceil(k / 4).
    """

    c: float
    convention: BudgetConvention = "paper"

    def __post_init__(self) -> None:
        at_least(1, compression=self.c)
        if math.isinf(self.c):
            raise ValueError(f"compression = {self.c}: must be finite")
        if self.convention not in ("paper", "bytes"):
            raise ValueError(f"convention = {self.convention!r}: must be 'paper' or 'bytes'")

    def at(self, seq_len: int, head_dim: int) -> SparFParams:
        if self.c == 1:
            r, k = head_dim, seq_len
        else:
            r = max(1, math.floor(head_dim / self.c))
            k = math.ceil(seq_len / (self.c if self.convention == "paper" else 2 * self.c))
        return SparFParams(r, k, math.ceil(k / 4))


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """The same r, k and l at every step; k and l are limited to the sequence length."""

    params: SparFParams

    def at(self, seq_len: int, head_dim: int) -> SparFParams:
        if self.params.r > head_dim:
            raise ValueError(f"r = {self.params.r}: must be at most {head_dim}, the channels of the model's heads")
        k = min(self.params.k, seq_len)
        return SparFParams(self.params.r, k, min(self.params.l, k))
