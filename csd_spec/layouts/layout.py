"""A layout as a value: what a drive stores of K and V, with which codec, in which groups; and how that fills pages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from csd_spec._check import at_least
from csd_spec.codecs import Codec
from csd_spec.model import FP16_BYTES
from csd_spec.progressive import Progressive

Packing = Literal["rows", "staged", "channels", "refined", "scores", "values"]
MAX_CODE = 255


@dataclass(frozen=True, slots=True)
class Group:
    """One map of a layout: which rows it holds and how they are packed into pages.

    Attributes:
        name: Name of the map. Kernels read those named k, v and embedding_k; methods read others from `KvView.maps`.
        source: Rows that it holds: "k", "v", or "kv" for both.
        packing: One of six of the FTL (`ftl.kv.layouts`): `rows`, token after token; `staged`, rows that wait in DRAM
            until a refined page holds them; `channels`, channel after channel; `refined`, `scores` and `values`, see
            `csd_spec.progressive`. Or a function from (form, layers, heads) to a map of your own.
        bits: Bits per value of channels; those of less than 16 are codes with a scale and a least value.
    """

    name: str
    source: str
    packing: Packing | Callable[[Any, int, int], Any]
    bits: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a drive stores of K and V.

    Attributes:
        name: Name by which users ask for it.
        code: The byte that stands for it in `SeqCreate` and in journals, 1 to 255; 240 to 255 are for plug-ins.
        rows: Codec of rows of K and V.
        groups: Its maps, in the order in which their pages are written.
        family: Layouts that store the same in other formats: the name of the FP16 one; "" if there are no others.
        latent: V is a part of K, and K alone is stored.
        lossy: What is kept of K and V; "" if all is.
        attended: Whether it can be attended, or is only read back.
        coarse: Bits of a value of K in score pages, on average, and of V in value pages; None without such pages.
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
            raise ValueError(f"layout {self.name}: codes of {self.bits} bits are made of FP16 or BF16 rows only")
        if (self.coarse is None) == self._packs("scores"):
            raise ValueError(f"layout {self.name}: coarse is needed with groups of scores, and with these alone")
        if "k" not in {group.name for group in self.groups}:
            raise ValueError(f"layout {self.name}: groups: one named k is needed")

    @property
    def bits(self) -> int:
        """Bits per value of the pages of channels that tokens are scored by, else 16."""
        return next((each.bits for each in self.groups if each.packing == "channels"), 16)

    @property
    def keeps_rows(self) -> bool:
        """Whether rows of K and V are stored, and not only refined pages."""
        return not self._packs("staged")

    def _packs(self, packing: Packing) -> bool:
        return any(group.packing == packing for group in self.groups)

    def form(self, page_bytes: int, head_dim: int, max_tokens: int) -> PageForm:
        """How a head's rows fill pages of sequences of about `max_tokens` tokens.

        Pages of channels have the smallest m of 2, 4, 8 whose groups fill at least four times: fewer channels a page
        waste less of what a selection of channels fetches, shorter groups leave fewer tokens waiting in drive DRAM.
        Codes have all channels in a page, since all are worth scoring then.

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

    def paged(self, page_bytes: int, head_dim: int, m: int) -> PageForm:
        """How a head's rows fill pages with m channels a page; raises ValueError if they do not fit."""
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
                raise ValueError(f"m = {m}: an embedding page holds 2, 4 or 8 channels, or all {head_dim}")
            if T < 1:
                raise ValueError(f"m = {m}: a page of {page_bytes} bytes has no room for one token's channels")
        return PageForm(self, page_bytes, head_dim, m, n, T, row_bytes, run_bytes, scale_bytes, progressive)

    def _progressive(self, page_bytes: int, head_dim: int, m: int) -> Progressive | None:
        if self.coarse is None:
            return None
        return Progressive(page_bytes, head_dim, *self.coarse, m, self.rows.value == "bf16", self.latent)


@cache
def _fitting(codec: Codec, nbytes: int) -> int:
    """Values of the longest vector that fits `nbytes` bytes."""
    return bisect_right(range(8 * nbytes + 1), nbytes, key=codec.row_bytes) - 1


@dataclass(frozen=True, slots=True)
class PageForm:
    """How one head's K and V fill pages (InstInfer, section IV-C); made by `Layout.form`.

    A token page holds n consecutive tokens of K or of V, row after row. An embedding page holds m channels of K for T
    consecutive tokens, channel after channel. With less than 16 bits a value is a code c, and stands for least + scale
    x c: the page begins with the scales of its m channels and then the least values, 2 bytes each. Of 4-bit codes, byte
    i holds token i in its low half and token i + T/2 in its high half.

    Attributes:
        layout: The layout that it is a form of.
        page_bytes: Bytes of a flash page.
        head_dim: Channels of a head.
        m: Channels of an embedding page or of a score page.
        n: Tokens of a token page or of a refined page.
        T: Tokens of an embedding page or of a score page.
        row_bytes: Bytes of a row of K or V.
        run_bytes: Bytes of one channel in an embedding page, without its scale; 0 where pages are progressive.
        scale_bytes: Bytes before the first channel of an embedding page.
        progressive: Form of score, value and refined pages; None without.
    """

    layout: Layout
    page_bytes: int
    head_dim: int
    m: int
    n: int
    T: int
    row_bytes: int
    run_bytes: int
    scale_bytes: int
    progressive: Progressive | None = None

    @property
    def rows(self) -> Codec:
        """Codec of rows of K and V."""
        return self.layout.rows

    @property
    def bits(self) -> int:
        """Bits per value of the pages that tokens are scored by."""
        return self.layout.bits

    @property
    def bf16(self) -> bool:
        """Whether values come and go as BF16: q and the output too."""
        return self.layout.rows.value == "bf16"

    @property
    def latent(self) -> bool:
        """Whether V is a part of K, and read with it."""
        return self.layout.latent

    @property
    def keeps_rows(self) -> bool:
        """Whether rows of K and V are stored, and not only refined pages."""
        return self.layout.keeps_rows

    @property
    def opaque(self) -> bool:
        """Whether values are only kept, 2 bytes each, and nothing is computed of them."""
        return not self.layout.attended

    @property
    def embedding_pages(self) -> int:
        """Embedding pages of one group of T tokens; the last may hold fewer than m channels."""
        return -(-self.head_dim // self.m)
