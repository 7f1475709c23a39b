"""What attends, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeVar, get_args

from csd_spec.layouts import Layout, layout_named, name_of, resolve
from csd_spec.sparf import Budget, Compression, Convention, SparFParams

Storage = Literal["fp16", "bf16", "fp8"]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Attention:
    """A method, by the name that drives know it by, within a budget.

    Attributes:
        method: Name of the method.
        budget: Channels and tokens that it may read.
        layout: Name of the layout of K and V in drives.
        storage: Format in which values are stored, or of which few bits are made: `fp16`, `bf16`, or `fp8` (layout fp16
            only). None is the model's: BF16 if it computes in that, else FP16.
    """

    method: str = "sparf"
    budget: Budget = Compression(8)
    layout: str = "fp16"
    storage: Storage | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", name_of(self.layout))
        if self.storage is None:
            return
        if self.storage not in get_args(Storage):
            raise ValueError(f"storage = {self.storage!r}: must be 'fp16', 'bf16' or 'fp8'")
        resolve(self.layout, self.storage, False, self.kv_layout.latent)

    @property
    def kv_layout(self) -> Layout:
        """The layout itself."""
        return layout_named(self.layout)

    def stored(self, bf16: bool, latent: bool = False) -> Attention:
        """The same for a model, with the layout in which its values are stored.

        Args:
            bf16: The model computes in BF16.
            latent: V is a part of K.

        Raises:
            ValueError: The layout cannot store values of the model, or of the storage that was asked for.
        """
        return replace(self, layout=resolve(self.layout, self.storage, bf16, latent).name)

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
        layout: str | None = None,
        storage: Storage | None = None,
    ) -> Attention:
        """A method, or an entry of `NAMED`, of which the other arguments replace their part."""
        known = NAMED.get(name, cls(name))
        assert isinstance(known.budget, Compression)
        asked = Compression(_or(compression, known.budget.c), _or(convention, known.budget.convention))
        return cls(known.method, budget or asked, _or(layout, known.layout), storage)


def _or(given: _T | None, else_: _T) -> _T:
    return else_ if given is None else given


_PROGRESSIVE = Attention("progressive", Compression(5, "bytes"), "progressive")
NAMED: Mapping[str, Attention] = MappingProxyType({"progressive": _PROGRESSIVE, "ours": _PROGRESSIVE})
