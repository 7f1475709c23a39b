"""A model's attention as a value, and how its K and V lie in flash pages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from csd_spec._check import at_least
from csd_spec.checked import Count, value
from csd_spec.planes import BRAIN, IN_K, Planes, bits_of

FP16_BYTES = 2
OPAQUE, BF16, LATENT, FP8 = 2, 3, 5, 6  # numbers of layouts


@value
class ModelShape:
    """What a drive needs to know of a decoder: layers, heads, head size.

    latent: whether V is a part of K, so that K alone is stored. v_head_dim: channels of V, where they are fewer than
    K's: drives store zeros for the others.
    """

    name: str
    layers: Count
    q_heads: Count
    kv_heads: Count
    head_dim: Count
    latent: bool = False
    v_head_dim: Count | None = None

    def __post_init__(self) -> None:
        if self.v_head_dim and self.v_head_dim > self.head_dim:
            raise ValueError(f"v_head_dim = {self.v_head_dim}: V has at most the {self.head_dim} channels of K")
        if self.q_heads % self.kv_heads:
            raise ValueError(f"q_heads = {self.q_heads}: must be a multiple of kv_heads = {self.kv_heads}")

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token over all layers and heads, FP16, as a model has them."""
        of_v = 0 if self.latent else self.v_head_dim or self.head_dim
        return self.layers * self.kv_heads * (self.head_dim + of_v) * FP16_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """How one head's K and V fill pages (InstInfer, section IV-C).

    A token page holds n consecutive tokens of K or of V, row after row. An embedding page holds m channels of
    K for T consecutive tokens, channel after channel: 2, 4 or 8, or all of a head.

    bits = 16 is FP16. With 8 or 4 a value is a code c, and stands for least + scale * c: the page begins with the
    scales of its m channels and then the least values, in 2 bytes each, as rows are. Of 4-bit codes, byte i holds token
    i in its low half and token i + T/2 in its high half.

    kind: 0 is this form; others are of layouts of their own (`ftl.kv.layouts`), which say what m and bits mean. Those
    of planes (`csd_spec.planes`) are here too: their token pages have as many tokens as refined pages.
    """

    page_bytes: int
    head_dim: int
    m: int
    bits: int = 16
    kind: int = 0

    def __post_init__(self) -> None:
        at_least(1, head_dim=self.head_dim, m=self.m)
        if self.n < 1:
            raise ValueError(
                f"head_dim = {self.head_dim}: a row of FP16 does not fit a page of {self.page_bytes} bytes"
            )
        if self.kind:
            return
        if self.bits not in (16, 8, 4):
            raise ValueError(f"bits = {self.bits}: an embedding page holds values of 16, 8 or 4 bits")
        if self.m not in (2, 4, 8, self.head_dim):
            raise ValueError(f"m = {self.m}: an embedding page holds 2, 4 or 8 channels, or all {self.head_dim}")
        if self.T < 1:
            raise ValueError(f"m = {self.m}: a page of {self.page_bytes} bytes has no room for one token's channels")

    @property
    def opaque(self) -> bool:
        """Whether values are kept as they are, 2 bytes each: BF16 as well, of which nothing is computed."""
        return self.kind == OPAQUE

    @property
    def bf16(self) -> bool:
        """Whether values come and go as BF16: q and the output too."""
        return self.kind in (BF16, FP8) or bool(self.planes and self.planes.bf16)

    @property
    def fp8(self) -> bool:
        """Whether values are stored in 8 bits (`csd_spec.float8`)."""
        return self.kind == FP8

    @property
    def latent(self) -> bool:
        """Whether V is a part of K, and read with it."""
        return self.kind == LATENT or bool(self.planes and self.planes.latent)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of K or V; of 8-bit values, its exponent is one more."""
        return self.head_dim + 1 if self.fp8 else FP16_BYTES * self.head_dim

    @property
    def n(self) -> int:
        """Tokens of a token page."""
        return self.planes.n if self.planes else self.page_bytes // self.row_bytes

    @property
    def planes(self) -> Planes | None:
        """The form of its planes, where it has any."""
        return _planes(self.page_bytes, self.head_dim, self.kind, self.m) if self.kind else None

    @property
    def T(self) -> int:
        """Tokens of an embedding page."""
        if self.planes:
            return self.planes.T
        if self.fp8:
            return self.page_bytes // self.m - 1
        T = (self.page_bytes - self.scale_bytes) * 8 // (self.bits * self.m)
        return T if self.bits == 16 else T // 2 * 2

    @property
    def run_bytes(self) -> int:
        """Bytes of one channel in an embedding page, its scale left out; of 8-bit values, with its exponent."""
        return self.T + 1 if self.fp8 else self.T * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes before the first channel of an embedding page."""
        return 0 if self.bits == 16 else 2 * FP16_BYTES * self.m

    @property
    def embedding_pages(self) -> int:
        """Embedding pages of one group of T tokens; the last may hold fewer than m channels."""
        return -(-self.head_dim // self.m)

    @classmethod
    def for_context(cls, page_bytes: int, head_dim: int, max_tokens: int, bits: int = 16, kind: int = 0) -> KvLayout:
        """In FP16 the smallest m of 2, 4, 8 whose groups fill at least four times over `max_tokens` tokens.

        Fewer channels a page waste less of what a channel selection fetches; shorter groups leave fewer
        tokens waiting in drive DRAM. With fewer bits, a page is of all channels: then all are worth scoring.
        """
        if bits != 16:
            return cls(page_bytes=page_bytes, head_dim=head_dim, m=head_dim, bits=bits, kind=kind)
        for m in (2, 4):
            layout = cls(page_bytes=page_bytes, head_dim=head_dim, m=m, kind=kind)
            if max_tokens >= 4 * layout.T:
                return layout
        return cls(page_bytes=page_bytes, head_dim=head_dim, m=8, kind=kind)


@cache
def _planes(page_bytes: int, head_dim: int, kind: int, m: int) -> Planes | None:
    bits = bits_of(kind)
    return Planes(page_bytes, head_dim, bits, m, bool(kind & BRAIN), bool(kind & IN_K)) if bits else None
