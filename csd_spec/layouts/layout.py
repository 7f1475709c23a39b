"""Layout of keys and values in a drive: codec, groups, and how they fill pages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from csd_spec._bounds import at_least
from csd_spec._derived import derive, derived
from csd_spec.codecs import Codec
from csd_spec.model import FP16_BYTES
from csd_spec.progressive import Progressive

Packing = Literal["rows", "staged", "channels", "refined", "scores", "values"]
MAX_CODE = 255


@dataclass(frozen=True, slots=True)
class Group:
    """One map of a layout: the rows it holds and how they are packed into pages.

    Attributes:
        name: Name of the map. Kernels read k, v and embedding_k; methods read others through `KvSlotView.maps`.
        source: Rows that it holds: "k", "v", or "kv" for both.
        packing: One of six packings of the FTL (`ftl.kv.layouts`): `rows`, token by token; `staged`, rows that stay in
            DRAM until a refined page holds them; `channels`, channel by channel; `refined`, `scores` and `values`, see
            `csd_spec.progressive`. Or a function from (form, layers, heads) to a custom map.
        bits: Bits per value for `channels`; less than 16 bits are codes with a scale and a minimum.
    """

    name: str
    source: str
    packing: Packing | Callable[[Any, int, int], Any]
    bits: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Storage of keys and values in a drive.

    Attributes:
        name: Name for users.
        code: Byte that identifies it in `SeqCreate` and in journals, 1 to 255; 240 to 255 are reserved for plug-ins.
        rows: Codec of key and value rows.
        groups: Its maps, in the order in which their pages are written.
        family: Name of the FP16 member of a family of layouts that differ in format only; "" if there is no other.
        latent: V is a part of K, and only K is stored.
        lossy: Stored precision of keys and values; "" if it is exact.
        attended: Whether drives can compute attention on it; False: it can only be read.
        coarse: Mean bits per value of K in score pages, and bits of V in value pages; None without such pages.
    """

    name: str
    code: int
    rows: Codec
    groups: tuple[Group, ...]
    family: str = ""
    latent: bool = False
    lossy: str = ""
    attended: bool = True
    coarse: tuple[float, int] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.code <= MAX_CODE:
            raise ValueError(f"layout {self.name}: code = {self.code}: must be 1 to {MAX_CODE}")
        if not self.rows.exact and self.bits < 16:
            raise ValueError(f"layout {self.name}: codes of {self.bits} bits need FP16 or BF16 rows")
        if (self.coarse is None) == self._packs("scores"):
            raise ValueError(f"layout {self.name}: coarse is needed with groups of scores, and with these alone")
        if "k" not in {group.name for group in self.groups}:
            raise ValueError(f"layout {self.name}: groups: one named k is needed")

    @property
    def bits(self) -> int:
        """Bits per value of the channel pages that tokens are scored by; 16 without codes."""
        return next((group.bits for group in self.groups if group.packing == "channels"), 16)

    @property
    def keeps_rows(self) -> bool:
        """Whether exact key and value rows are stored, not only refined pages."""
        return not self._packs("staged")

    def _packs(self, packing: Packing) -> bool:
        return any(group.packing == packing for group in self.groups)

    def form(self, page_bytes: int, head_dim: int, max_tokens: int) -> PageFormat:
        """Return the page format for sequences of about `max_tokens` tokens.

        Channel pages use the smallest m of 2, 4, 8 for which the sequence fills at least four groups: fewer channels
        per page waste less of a fetch, and shorter groups leave fewer tokens in drive DRAM. With codes, a page has all
        channels, since scoring all of them is worthwhile then.

        Raises:
            ValueError: A row does not fit a page.
        """
        if self.coarse:
            m = Progressive.for_context(page_bytes, head_dim, self.coarse, max_tokens, self.latent).m
            return self.paged(page_bytes, head_dim, m)
        if self.bits < 16 or not self._packs("channels"):
            return self.paged(page_bytes, head_dim, head_dim)
        for m in (2, 4):
            form = self.paged(page_bytes, head_dim, m)
            if max_tokens >= 4 * form.T:
                return form
        return self.paged(page_bytes, head_dim, 8)

    def paged(self, page_bytes: int, head_dim: int, m: int) -> PageFormat:
        """Return the page format with m channels per page; raises ValueError if rows do not fit."""
        at_least(1, head_dim=head_dim, m=m)
        row_bytes = self.rows.row_bytes(head_dim)
        scale_bytes = 0 if self.bits == 16 else 2 * FP16_BYTES * m
        progressive = self._progressive(page_bytes, head_dim, m)
        if progressive:
            n, T, run_bytes = progressive.n, progressive.T, 0
        elif self.bits < 16:
            n, T = page_bytes // row_bytes, (page_bytes - scale_bytes) * 8 // (self.bits * m) // 2 * 2
            run_bytes = T * self.bits // 8
        else:
            n, T = page_bytes // row_bytes, _fitting(self.rows, page_bytes // m)
            run_bytes = self.rows.row_bytes(T)
        if n < 1:
            raise ValueError(
                f"head_dim = {head_dim}: a row of {self.rows.name.upper()} does not fit a page of {page_bytes} bytes"
            )
        if self._packs("channels"):
            if m not in (2, 4, 8, head_dim):
                raise ValueError(f"m = {m}: must be 2, 4, 8 or all {head_dim} channels of a head")
            if T < 1:
                raise ValueError(f"m = {m}: a page of {page_bytes} bytes has no room for one token's channels")
        return PageFormat(self, page_bytes, head_dim, m, n, T, row_bytes, run_bytes, scale_bytes, progressive)

    def _progressive(self, page_bytes: int, head_dim: int, m: int) -> Progressive | None:
        if self.coarse is None:
            return None
        return Progressive(page_bytes, head_dim, *self.coarse, m, self.rows.value == "bf16", self.latent)


@cache
def _fitting(codec: Codec, nbytes: int) -> int:
    """Length of the longest vector that fits `nbytes` bytes, values."""
    return bisect_right(range(8 * nbytes + 1), nbytes, key=codec.row_bytes) - 1


@dataclass(frozen=True, slots=True)
class PageFormat:
    """Page format of one head's keys and values (InstInfer, section IV-C); created by `KvLayout.form`.

    A token page holds n consecutive tokens of K or of V, row after row. An embedding page holds m channels of K for T
    consecutive tokens, channel after channel. With fewer than 16 bits, a value is minimum + scale x code: the page
    begins with the scales of its m channels, then the minimums, 2 bytes each. With 4-bit codes, byte i holds token i in
    its low half and token i + T/2 in its high half.

    Attributes:
        layout: Layout of this format.
        page_bytes: Bytes of a flash page.
        head_dim: Channels of a head.
        m: Channels of an embedding page or of a score page.
        n: Tokens of a token page or of a refined page.
        T: Tokens of an embedding page or of a score page.
        row_bytes: Bytes of a row of K or V.
        run_bytes: Bytes of one channel in an embedding page, without its scale; 0 with progressive pages.
        scale_bytes: Bytes before the first channel of an embedding page.
        progressive: Format of score, value and refined pages; None if the layout has none.
        rows: Codec of key and value rows.
        bits: Bits per value of the pages that tokens are scored by.
        bf16: Whether values are exchanged as BF16, including q and the output.
        latent: Whether V is a part of K.
        keeps_rows: Whether exact key and value rows are stored, not only refined pages.
        opaque: Whether values are uninterpreted bytes, 2 per value, on which nothing is computed.
        embedding_pages: Embedding pages per group of T tokens; the last one may hold fewer than m channels.
    """

    layout: KvLayout
    page_bytes: int
    head_dim: int
    m: int
    n: int
    T: int
    row_bytes: int
    run_bytes: int
    scale_bytes: int
    progressive: Progressive | None = None
    rows: Codec = derived()
    bits: int = derived()
    bf16: bool = derived()
    latent: bool = derived()
    keeps_rows: bool = derived()
    opaque: bool = derived()
    embedding_pages: int = derived()

    def __post_init__(self) -> None:
        layout = self.layout
        derive(
            self,
            rows=layout.rows,
            bits=layout.bits,
            bf16=layout.rows.value == "bf16",
            latent=layout.latent,
            keeps_rows=layout.keeps_rows,
            opaque=not layout.attended,
            embedding_pages=-(-self.head_dim // self.m),
        )
