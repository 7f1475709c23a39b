"""What attends, as one value."""

from __future__ import annotations

from dataclasses import dataclass

from csd_spec._check import at_least
from csd_spec.sparf import Budget, Compression, SparFParams


@dataclass(frozen=True, slots=True)
class Attention:
    """A method, by the name that drives know it by, within a budget.

    embedding_bits: of the values of the embedding-indexed copy of K, 16, 8 or 4; or the number of another layout that
    the drives have.
    """

    method: str = "sparf"
    budget: Budget = Compression(8)
    embedding_bits: int = 16

    def __post_init__(self) -> None:
        at_least(1, embedding_bits=self.embedding_bits)

    def at(self, seq_len: int, head_dim: int) -> SparFParams:
        """The budget's parameters for `seq_len` stored tokens of `head_dim` channels."""
        return self.budget.at(seq_len, head_dim)
