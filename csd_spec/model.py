"""A model's attention as a value, and how its K and V lie in flash pages."""

from __future__ import annotations

from dataclasses import dataclass

from csd_spec._check import at_least

FP16_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a drive needs to know of a decoder: layers, heads, head size."""

    name: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        at_least(1, layers=self.layers, q_heads=self.q_heads, kv_heads=self.kv_heads, head_dim=self.head_dim)
        if self.q_heads % self.kv_heads:
            raise ValueError(f"q_heads = {self.q_heads}: must be a multiple of kv_heads = {self.kv_heads}")

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token over all layers and heads, FP16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * FP16_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """How one head's K and V fill pages (InstInfer, section IV-C).

    A token page holds n consecutive tokens of K or of V, row after row. An embedding page holds m channels of
    K for T consecutive tokens, channel after channel.
    """

    page_bytes: int
    head_dim: int
    m: int

    def __post_init__(self) -> None:
        at_least(1, head_dim=self.head_dim, m=self.m)
        if self.n < 1:
            raise ValueError(
                f"head_dim = {self.head_dim}: a row of FP16 does not fit a page of {self.page_bytes} bytes"
            )
        if self.page_bytes % (FP16_BYTES * self.m):
            raise ValueError(f"m = {self.m}: does not divide a page of {self.page_bytes} bytes into FP16 channels")

    @property
    def n(self) -> int:
        """Tokens of a token page."""
        return self.page_bytes // (FP16_BYTES * self.head_dim)

    @property
    def T(self) -> int:
        """Tokens of an embedding page."""
        return self.page_bytes // (FP16_BYTES * self.m)

    @property
    def embedding_pages(self) -> int:
        """Embedding pages of one group of T tokens; the last may hold fewer than m channels."""
        return -(-self.head_dim // self.m)

    @classmethod
    def for_context(cls, page_bytes: int, head_dim: int, max_tokens: int) -> KvLayout:
        """The smallest m of 2, 4, 8 whose groups fill at least four times over `max_tokens` tokens.

        Fewer channels a page waste less of what a channel selection fetches; shorter groups leave fewer
        tokens waiting in drive DRAM.
        """
        for m in (2, 4):
            layout = cls(page_bytes=page_bytes, head_dim=head_dim, m=m)
            if max_tokens >= 4 * layout.T:
                return layout
        return cls(page_bytes=page_bytes, head_dim=head_dim, m=8)
