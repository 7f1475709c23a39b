"""What attends, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeVar, get_args

from csd_spec._check import at_least
from csd_spec.model import BF16, FP8, LATENT
from csd_spec.planes import BITS, BRAIN, IN_K, bits_of, is_lossy, number_of
from csd_spec.sparf import Budget, Compression, Convention, SparFParams

Storage = Literal["fp16", "bf16", "fp8"]
_ROWS: Mapping[Storage, int] = MappingProxyType({"fp16": 16, "bf16": BF16, "fp8": FP8})
_FEW = ", ".join(str(number_of(bits, exact=False)) for bits in BITS)
_T = TypeVar("_T")


def storage_of(number: int) -> Storage:
    """What a layout stores values as, or makes few bits of."""
    if number == FP8:
        return "fp8"
    few = number ^ BRAIN in (8, 4) or (bits_of(number) and number & BRAIN)
    return "bf16" if few or number == BF16 else "fp16"


def _stored_as(number: int, storage: Storage) -> int:
    """The layout that keeps what another does, of values of that storage; the same where there is none."""
    if number == 16:
        return _ROWS[storage]
    return number | BRAIN if storage == "bf16" and (number in (8, 4) or bits_of(number)) else number


@dataclass(frozen=True, slots=True)
class Attention:
    """A method, by the name that drives know it by, within a budget.

    embedding_bits: the layout of K and V: 16, 8 or 4, of the values of the embedding-indexed copy of K; or the number
    of another layout that the drives have (`csd_spec.planes.number_of`).
    storage: what values are stored as, or few bits made of, `fp16`, `bf16` or, of layout 16, `fp8`; None is as the
    model has them, BF16 where it computes in that.
    """

    method: str = "sparf"
    budget: Budget = Compression(8)
    embedding_bits: int = 16
    storage: Storage | None = None

    def __post_init__(self) -> None:
        at_least(1, embedding_bits=self.embedding_bits)
        if self.storage not in (None, *get_args(Storage)):
            raise ValueError(f"storage = {self.storage!r}: must be 'fp16', 'bf16' or 'fp8'")
        if self.storage and storage_of(number := _stored_as(self.embedding_bits, self.storage)) != self.storage:
            of = storage_of(number).upper()
            raise ValueError(f"storage = {self.storage!r}: layout {self.embedding_bits} is of {of}, use layout 16")

    def stored(self, bf16: bool, latent: bool = False) -> Attention:
        """The same for a model, whose layout says what values are stored as. bf16: whether the model computes in it.
        latent: whether V is a part of K."""
        number, wanted = self.embedding_bits, self.storage or ("bf16" if bf16 else "fp16")
        if not latent and (number == LATENT or (bits_of(number) and number & IN_K)):
            raise ValueError(f"embedding_bits = {number}: V is no part of K in this model")
        if latent and number in (16, LATENT):
            if self.storage in ("bf16", "fp8"):
                raise ValueError(f"storage = {self.storage!r}: rows of K of which V is a part are stored in FP16")
            return replace(self, embedding_bits=LATENT)
        if latent and not is_lossy(number):
            raise ValueError(f"embedding_bits = {number}: K of which V is a part has layouts 16 and {_FEW} alone")
        return replace(self, embedding_bits=_stored_as(number, wanted) | IN_K * latent)

    def at(self, seq_len: int, head_dim: int) -> SparFParams:
        """The budget's parameters for `seq_len` stored tokens of `head_dim` channels."""
        return self.budget.at(seq_len, head_dim)

    @classmethod
    def named(
        cls,
        name: str,
        compression: float | None = None,
        convention: Convention | None = None,
        budget: Budget | None = None,
        embedding_bits: int | None = None,
        storage: Storage | None = None,
    ) -> Attention:
        """A method, or what is known as a whole by a name of `NAMED`; what is given besides replaces its part of it."""
        known = NAMED.get(name, cls(name))
        assert isinstance(known.budget, Compression)
        asked = Compression(_or(compression, known.budget.c), _or(convention, known.budget.convention))
        return cls(known.method, budget or asked, _or(embedding_bits, known.embedding_bits), storage)


def _or(given: _T | None, else_: _T) -> _T:
    return else_ if given is None else given


NAMED: Mapping[str, Attention] = MappingProxyType(
    {"ours": Attention("progressive", Compression(7, "bytes"), number_of(2, exact=False))}
)
