"""The engine's parameters: what the RTL is built with, what its registers hold, and what the clock counts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from csd_spec import SparFParams
from csd_spec.planes import BLOCK, Planes

LOG2_E = 1.4426950408889634


def _scale(head_dim: int) -> tuple[int, int]:
    value = LOG2_E / math.sqrt(head_dim)
    exp = 24 - math.frexp(value)[1]
    return round(value * 2**exp), exp


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """What an engine is built for.

    head_dim: d; q_heads: queries that share a KV head; lanes: FP16 values a beat of the page stream, and products a
    cycle; n_max: longest sequence; page_bytes; topk_ways: keys that argtopk takes a cycle.
    """

    head_dim: int
    q_heads: int = 1
    lanes: int = 32
    n_max: int = 2048
    page_bytes: int = 4096
    topk_ways: int = 8

    def __post_init__(self) -> None:
        if self.lanes not in (8, 16, 32, 64, 128):
            raise ValueError(f"lanes = {self.lanes}: must be 8, 16, 32, 64 or 128")
        if self.head_dim % self.lanes or not self.lanes <= self.head_dim <= 128:
            raise ValueError(f"head_dim = {self.head_dim}: must be a multiple of the {self.lanes} lanes, at most 128")
        if not 1 <= self.q_heads <= 8:
            raise ValueError(f"q_heads = {self.q_heads}: must be 1 to 8")
        if self.topk_ways not in (2, 4, 8, 16, 32):
            raise ValueError(f"topk_ways = {self.topk_ways}: must be 2, 4, 8, 16 or 32")
        if self.n_max % self.topk_ways or not self.head_dim <= self.n_max <= 32768:
            raise ValueError(f"n_max = {self.n_max}: must be a multiple of {self.topk_ways}, head_dim to 32768")
        if self.page_bytes & self.page_bytes - 1 or self.page_bytes < 16 * max(self.lanes, self.head_dim):
            raise ValueError(f"page_bytes = {self.page_bytes}: must be a power of two, an eighth of it a beat at least")

    @property
    def page_values(self) -> int:
        return self.page_bytes // 2

    @property
    def page_beats(self) -> int:
        return self.page_values // self.lanes

    @property
    def scale(self) -> tuple[int, int]:
        """log2(e) / sqrt(d) as (mant, exp), worth mant x 2^-exp with 24 bits of mant."""
        return _scale(self.head_dim)

    def verilog(self) -> dict[str, int]:
        """Parameters of `sparf_engine`."""
        mant, exp = self.scale
        return {
            "DIM": self.head_dim,
            "Q_HEADS": self.q_heads,
            "LANES": self.lanes,
            "N_MAX": self.n_max,
            "PAGE_VALUES": self.page_values,
            "WAYS": self.topk_ways,
            "SCALE_MANT": mant,
            "SCALE_EXP": exp,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """One run: its selection, m channels and n tokens a page, and the tokens in the sequence."""

    shape: EngineShape
    sparf: SparFParams
    m: int
    n: int
    seq_len: int

    def __post_init__(self) -> None:
        shape = self.shape
        if self.m not in (1, 2, 4, 8):
            raise ValueError(f"m = {self.m}: must be 1, 2, 4 or 8")
        if not 1 <= self.n <= 64 or self.n * shape.head_dim > shape.page_values:
            raise ValueError(f"n = {self.n}: must be 1 to 64, and n rows must fit a page")
        if not 1 <= self.seq_len <= shape.n_max:
            raise ValueError(f"seq_len = {self.seq_len}: must be 1 to {shape.n_max}")
        if self.sparf.r > shape.head_dim or self.sparf.k > self.seq_len:
            raise ValueError(f"r = {self.sparf.r}, k = {self.sparf.k}: at most {shape.head_dim} and {self.seq_len}")

    @property
    def group_tokens(self) -> int:
        """T, tokens of a page of channels."""
        return self.shape.page_values // self.m

    @property
    def groups(self) -> int:
        return -(-self.seq_len // self.group_tokens)

    def registers(self) -> dict[int, int]:
        """Address and value of the registers of `sparf_ctrl`."""
        p = self.sparf
        return {0x08: p.r, 0x0C: p.k, 0x10: p.l, 0x14: self.m, 0x18: self.n, 0x1C: self.seq_len}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneShape:
    """What the units for pages of few-bit K are built for, `plane_scores` and `int8_unpack`: those of layout planes2.

    head_dim: d, channels of a page; q_heads: queries that share a KV head; page_bytes: of either kind of page.
    """

    head_dim: int
    q_heads: int = 1
    page_bytes: int = 4096

    def __post_init__(self) -> None:
        if self.head_dim % 16 or not 16 <= self.head_dim <= 128:
            raise ValueError(f"head_dim = {self.head_dim}: must be a multiple of 16, at most 128")
        if not 1 <= self.q_heads <= 8:
            raise ValueError(f"q_heads = {self.q_heads}: must be 1 to 8")
        if self.page_bytes % 16 or self.page_bytes < 13 * self.head_dim:
            raise ValueError(f"page_bytes = {self.page_bytes}: must be blocks of 16, 13 x head_dim at least")
        if self.page_bytes - self.header_bytes >= (self.rows + 1) * self.tokens // 2:
            raise ValueError(
                f"page_bytes = {self.page_bytes}: more than 8 bits a channel of head_dim = {self.head_dim}"
            )

    @property
    def form(self) -> Planes:
        """Of the pages."""
        return Planes(self.page_bytes, self.head_dim, 2, self.head_dim)

    @property
    def tokens(self) -> int:
        """T, tokens of a page of scores: blocks of 32."""
        return self.form.T

    @property
    def row_blocks(self) -> int:
        """Blocks of 32 tokens in a row."""
        return self.tokens // BLOCK

    @property
    def header_bytes(self) -> int:
        """Scale and least value of each channel, FP16, and its width, a byte."""
        return self.form.header_bytes

    @property
    def rows(self) -> int:
        """Rows of four planes, half a byte a token."""
        return self.form.rows

    @property
    def planes(self) -> int:
        """R, bits that a page has for a token's channels."""
        return 4 * self.rows

    @property
    def refined(self) -> int:
        """n, tokens of a page of K and V in 8 bits."""
        return self.form.n

    @property
    def scale(self) -> tuple[int, int]:
        """log2(e) / sqrt(d), as `EngineShape.scale`."""
        return _scale(self.head_dim)

    def verilog(self) -> dict[str, int]:
        """Parameters of `plane_scores`."""
        mant, exp = self.scale
        return {
            "DIM": self.head_dim,
            "Q_HEADS": self.q_heads,
            "PAGE_BYTES": self.page_bytes,
            "SCALE_MANT": mant,
            "SCALE_EXP": exp,
        }
