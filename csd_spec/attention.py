"""Attention configuration: method, budget, layout and storage format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeVar, get_args

from csd_spec.layouts import KvLayout, layout_named, resolve
from csd_spec.sparf import BudgetConvention, CompressionBudget, SparFParams, SparsityBudget

KvDtype = Literal["fp16", "bf16", "fp8"]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """An attention method and the budget within which it works.

    Attributes:
        method: Name of the method, as registered in the drives.
        budget: Channels and tokens that it may read.
        layout: Name of the KV layout in drives.
        kv_dtype: Format in which values are stored (or quantized from): `fp16`, `bf16`, or `fp8` (layout fp16 only).
            None uses the model's: BF16 if it computes in BF16, otherwise FP16.
    """

    method: str = "sparf"
    budget: SparsityBudget = CompressionBudget(8)
    layout: str = "fp16"
    kv_dtype: KvDtype | None = None

    def __post_init__(self) -> None:
        layout_named(self.layout)
        if self.kv_dtype is None:
            return
        if self.kv_dtype not in get_args(KvDtype):
            raise ValueError(f"kv_dtype = {self.kv_dtype!r}: must be 'fp16', 'bf16' or 'fp8'")
        resolve(self.layout, self.kv_dtype, False, self.kv_layout.latent)

    @property
    def kv_layout(self) -> KvLayout:
        """The `KvLayout` that `layout` names."""
        return layout_named(self.layout)

    def for_model_dtype(self, bf16: bool, latent: bool = False) -> AttentionConfig:
        """Return the configuration for a model, with the layout that stores its values.

        Args:
            bf16: The model computes in BF16.
            latent: V is a part of K.

        Raises:
            ValueError: The layout cannot store the model's values, or not in the requested storage format.
        """
        return replace(self, layout=resolve(self.layout, self.kv_dtype, bf16, latent).name)

    def at(self, seq_len: int, head_dim: int) -> SparFParams:
        """Return the budget's parameters for `seq_len` stored tokens of `head_dim` channels."""
        return self.budget.at(seq_len, head_dim)

    @classmethod
    def named(
        cls,
        name: str,
        compression: float | None = None,
        convention: BudgetConvention | None = None,
        budget: SparsityBudget | None = None,
        layout: str | None = None,
        kv_dtype: KvDtype | None = None,
    ) -> AttentionConfig:
        """Return a method, or an entry of `NAMED`, with the other arguments replacing its defaults."""
        defaults = NAMED.get(name, cls(name))
        assert isinstance(defaults.budget, CompressionBudget)
        default_budget = CompressionBudget(
            _first_given(compression, defaults.budget.c), _first_given(convention, defaults.budget.convention)
        )
        return cls(defaults.method, budget or default_budget, _first_given(layout, defaults.layout), kv_dtype)


def _first_given(argument: _T | None, else_: _T) -> _T:
    return else_ if argument is None else argument


_PROGRESSIVE = AttentionConfig("progressive", CompressionBudget(5, "bytes"), "progressive")
NAMED: Mapping[str, AttentionConfig] = MappingProxyType({"progressive": _PROGRESSIVE, "ours": _PROGRESSIVE})
