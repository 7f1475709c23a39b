"""Parameters of the engine: RTL build parameters, register values, and inputs of the clock model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from csd_spec import SparFParams
from csd_spec.progressive import LANES, LINE, Progressive

LOG2_E = 1.4426950408889634


def _scale(head_dim: int) -> tuple[int, int]:
    return _mant_exp(LOG2_E / math.sqrt(head_dim))


def _mant_exp(value: float) -> tuple[int, int]:
    exp = 24 - math.frexp(value)[1]
    return round(value * 2**exp), exp


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """Build parameters of an engine.

    Attributes:
        head_dim: d.
        q_heads: Queries that share a KV head.
        lanes: FP16 values in a beat of the page stream, and products in a cycle.
        n_max: Longest sequence.
        page_bytes: Size of a page.
        topk_ways: Keys that argtopk accepts in a cycle.
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
        """Return log2(e) / sqrt(d) = mant x 2^-exp as (mant, exp) with a 24-bit mant."""
        return _scale(self.head_dim)

    def verilog(self) -> dict[str, int]:
        """Return the parameters of `sparf_engine`."""
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
    """Parameters of one run: selection, m channels and n tokens in a page, and tokens in the sequence."""

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
        """Return T, the tokens of a page of channels."""
        return self.shape.page_values // self.m

    @property
    def groups(self) -> int:
        return -(-self.seq_len // self.group_tokens)

    def registers(self) -> dict[int, int]:
        """Return addresses and values of the registers of `sparf_ctrl`."""
        p = self.sparf
        return {0x08: p.r, 0x0C: p.k, 0x10: p.l, 0x14: self.m, 0x18: self.n, 0x1C: self.seq_len}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressiveShape:
    """Build parameters of the units for progressive-precision pages.

    Attributes:
        head_dim: d.
        m: Channels of a score page and of a value page.
        q_heads: Queries that share a KV head.
        page_bytes: Size of pages of all types.
        k_bits: Bits of a value of K.
        v_bits: Bits of a value of V.
    """

    head_dim: int
    m: int = 64
    q_heads: int = 1
    page_bytes: int = 4096
    k_bits: float = 2
    v_bits: int = 2

    def __post_init__(self) -> None:
        if self.m % LANES or not LANES <= self.m <= 128:
            raise ValueError(f"m = {self.m}: must be a multiple of {LANES}, at most 128")
        if self.head_dim % self.m or not self.m <= self.head_dim <= 128:
            raise ValueError(f"head_dim = {self.head_dim}: must be a multiple of the {self.m} channels, at most 128")
        if not 1 <= self.q_heads <= 8:
            raise ValueError(f"q_heads = {self.q_heads}: must be 1 to 8")
        if self.page_bytes % LINE:
            raise ValueError(f"page_bytes = {self.page_bytes}: must be lines of {LINE}")
        _ = self.form

    @property
    def form(self) -> Progressive:
        """Return the form of the pages."""
        return Progressive(self.page_bytes, self.head_dim, self.k_bits, self.v_bits, self.m)

    @property
    def parts(self) -> int:
        """Return the number of score pages, and of value pages, for all channels of a token."""
        return self.head_dim // self.m

    @property
    def refined(self) -> int:
        """Return n, the tokens of a refined page."""
        return self.form.n

    @property
    def scale(self) -> tuple[int, int]:
        """Return log2(e) / sqrt(d), as `EngineShape.scale`."""
        return _scale(self.head_dim)

    def digit_scores(self) -> dict[str, int]:
        """Return the parameters of `digit_scores`."""
        mant, exp = self.scale
        return {
            "DIM": self.m,
            "PARTS": self.parts,
            "DIGITS": self.form.D,
            "Q_HEADS": self.q_heads,
            "PAGE_BYTES": self.page_bytes,
            "SCALE_MANT": mant,
            "SCALE_EXP": exp,
        }

    def value_sums(self) -> dict[str, int]:
        """Return the parameters of `value_sums`."""
        head = self.form.value_header // 16
        return {"DIM": self.m, "PARTS": self.parts, "V_BITS": self.v_bits, "Q_HEADS": self.q_heads, "HEAD": head}

    def value_weights(self) -> dict[str, int]:
        """Return the parameters of `value_weights`."""
        form = self.form
        return {"Q_HEADS": self.q_heads, "HEAD": form.value_header // 16, "BLOCK": form.value_block}

    @property
    def unrotate(self) -> tuple[int, int]:
        """Return 1 / sqrt(rotation) = mant x 2^-exp as (mant, exp) with a 24-bit mant."""
        return _mant_exp(1 / math.sqrt(self.rotation))

    def engine(self, n_max: int) -> dict[str, int]:
        """Return the parameters of `progressive_engine` for sequences of up to n_max tokens."""
        mant, exp = self.unrotate
        return {
            **self.digit_scores(),
            "V_BITS": self.v_bits,
            "N_MAX": n_max,
            "SCORE_TOKENS": self.form.T,
            "REFINED": self.refined,
            "VALUES": self.form.value_tokens,
            "HEAD": self.form.value_header // 16,
            "ROT_MANT": mant,
            "ROT_EXP": exp,
        }

    def page_gains(self) -> dict[str, int]:
        """Return the parameters of `page_gains`."""
        return {"Q_HEADS": self.q_heads, "REFINED": self.refined, "VALUES": self.form.value_tokens}

    @property
    def rotation(self) -> int:
        """Return the number of channels that are rotated together: the largest power of two that divides m."""
        return self.m & -self.m


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressiveRun:
    """Parameters of one run of `progressive_engine`: tokens, and thresholds with 32 fractional bits.

    Attributes:
        gain_threshold: Minimum sum of squared weights of a refined page, as a fraction of l^2.
        mass_threshold: Minimum sum of weights of a value page, as a fraction of l.
    """

    shape: ProgressiveShape
    seq_len: int
    gain_threshold: int
    mass_threshold: int

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise ValueError(f"seq_len = {self.seq_len}: must be 1 at least")
        for name in ("gain_threshold", "mass_threshold"):
            if not 0 <= getattr(self, name) < 1 << 32:
                raise ValueError(f"{name} = {getattr(self, name)}: must have 32 bits")

    def registers(self) -> dict[int, int]:
        """Return addresses and values of the registers of `progressive_engine`."""
        return {0x08: self.seq_len, 0x0C: self.gain_threshold, 0x10: self.mass_threshold}
