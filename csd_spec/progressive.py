"""Progressive-precision pages: low-bit keys and values of all tokens, INT8 ones for the tokens that matter.

A *score page* holds m channels of K of one head for T consecutive tokens. A value is minimum + scale x code. A code has
0 to 4 digits of 2 bits, lowest first; channels get digits by their range, and the digits of all channels are stored
one after the other, D per token.

| bytes | field |
|---|---|
| 2 m | scale of each channel, FP16 or BF16 |
| 2 m | minimum of each channel, same format |
| m | digits of each channel, 0 to 4; zero-padded to a multiple of 64 bytes |
| T x D / 4 | lines of 64 bytes: D / 16 lines per 16 tokens |

Byte 4 t + j of line i has digits 16 i + 4 s + j of token t, s = 0 to 3, at bit 2 s.

A *value page* holds m channels of V of one head for `value_tokens` consecutive tokens. Rows are rotated, which gives
all channels a similar distribution: the signs of the channels in `SIGNS` are flipped, then each run of channels (its
length is the largest power of two that divides m) is multiplied by an orthonormal Hadamard matrix. A value is then
size x (code - (2^b - 1) / 2) + rest, where rest is the mean quantization error of the page's tokens, so that errors of
many tokens cancel: its code c represents c x |c| / 2048 of the page's largest size. A partial page has no rest.

| bytes | field |
|---|---|
| 2 per token | size (step) of each token, FP16 or BF16; zero-padded to a multiple of 64 bytes |
| m | code of the rest of each rotated channel, int8; zero-padded to a multiple of 64 bytes |
| m x b / 8 per token | lines of 64 bytes: for each 8 / b x 4 tokens, one line per 16 channels |

Byte 4 i + j of the line of channel group c has channel 16 c + i of tokens 4 s + j, s = 0 to 8 / b - 1, at bit b s.

A *refined page* holds keys and values of n consecutive tokens: an exponent e of each channel of K and of each token of
V (int8, the latter zero-padded to a multiple of d), n rows of d int8 codes of K, n rows of V. A value is code x 2^e,
which FP16 (or BF16, for BF16 rows) represents exactly. K has channels that are large in all tokens, V has tokens that
are small in all channels: attention sinks. If V is a part of K, refined and value pages hold only K.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from csd_spec._bounds import at_least
from csd_spec._derived import derive, derived

LINE = 64  # bytes of a line
LANES = 16  # tokens per line of digits, channels per line of values
QUAD = 4  # values that are summed at once
DIGITS = 4  # maximum digits of a code of K
RESTS = np.float32(1 / 2048)  # unit of rest codes, in sizes: the value of code 1
SIGNS = np.uint64(
    0x9E3779B97F4A7C15
)  # bit i % 64 of channel i: pseudorandom, so that no common row equals a row of the matrix
MAX_T = 256
MAX_CODE = 127
EXPONENTS, EXPONENTS_BF16 = (-24, 9), (-126, 120)  # smallest, largest e for which FP16 or BF16 represents code x 2^e


def _up(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE


@cache
def _value_tokens(page_bytes: int, m: int, block: int) -> int:
    """Maximum tokens whose sizes and lines, `block` tokens each, fit a page with the rests of m channels."""
    room, lines = page_bytes - _up(m), LINE * -(-m // LANES)
    return next((count for count in range(MAX_T, 0, -block) if _up(2 * count) + count // block * lines <= room), 0)


@dataclass(frozen=True, slots=True)
class Progressive:
    """Progressive-precision page format of one head. What follows from it is computed once: every step reads it.

    Attributes:
        page_bytes: Bytes of a flash page.
        head_dim: Channels of a head.
        k_bits: Mean bits per value of K in score pages (minimum).
        v_bits: Bits per value of V in value pages, 2 or 4.
        m: Channels of a score page and of a value page.
        bf16: Whether rows and headers are BF16.
        latent: Whether V is a part of K.
        D: Digits per token in a score page.
        header_bytes: Bytes before the lines of a score page.
        T: Tokens per score page.
        value_block: Tokens per line of values.
        value_lines: Lines per `value_block` tokens: one per 16 channels.
        value_tokens: Tokens per value page.
        sizes_bytes: Bytes before the channel rests of a value page.
        value_header: Bytes before the lines of a value page.
        parts: Rows per token in a refined page: K, and V unless it is a part of K.
        n: Tokens per refined page.
        refined_header: Bytes before the rows of a refined page.
        refined_bytes: Bytes of a refined page that are used.
        buffers: Page buffers per head that stage the exact rows of an unfinished group: 2 if V is a part of K, else 1.
        waiting: Tokens staged per page buffer.
    """

    page_bytes: int
    head_dim: int
    k_bits: float
    v_bits: int
    m: int
    bf16: bool = False
    latent: bool = False
    D: int = derived()
    header_bytes: int = derived()
    T: int = derived()
    value_block: int = derived()
    value_lines: int = derived()
    value_tokens: int = derived()
    sizes_bytes: int = derived()
    value_header: int = derived()
    parts: int = derived()
    n: int = derived()
    refined_header: int = derived()
    refined_bytes: int = derived()
    buffers: int = derived()
    waiting: int = derived()

    def __post_init__(self) -> None:
        at_least(1, head_dim=self.head_dim, m=self.m)
        if not 1 <= self.k_bits <= 8 or self.v_bits not in (2, 4):
            raise ValueError(f"bits = {self.k_bits}, {self.v_bits}: must be 1 to 8 for K, and 2 or 4 for V")
        page_bytes, d, m, latent = self.page_bytes, self.head_dim, self.m, self.latent
        digits, header = -(-int(-(-self.k_bits * m // 2)) // LANES) * LANES, _up(5 * m)
        value_block = QUAD * 8 // self.v_bits
        lines, value_tokens = page_bytes // d - 1, _value_tokens(page_bytes, m, value_block)
        T, n = min(MAX_T, (page_bytes - header) // (4 * digits) * LANES), lines if latent else lines * d // (2 * d + 1)
        if n < 1 or T < LANES or value_tokens < LANES:
            raise ValueError(f"head_dim = {d}: its codes do not fit pages of {page_bytes} bytes")
        sizes_bytes, refined_header = _up(2 * value_tokens), d * (1 if latent else 1 + -(-n // d))
        parts, buffers = 2 - latent, -(-2 * n * d // page_bytes)
        derive(
            self,
            D=digits,
            header_bytes=header,
            T=T,
            value_block=value_block,
            value_lines=-(-m // LANES),
            value_tokens=value_tokens,
            sizes_bytes=sizes_bytes,
            value_header=sizes_bytes + _up(m),
            parts=parts,
            n=n,
            refined_header=refined_header,
            refined_bytes=refined_header + parts * n * d,
            buffers=buffers,
            waiting=-(-n // buffers),
        )

    @classmethod
    def for_context(
        cls, page_bytes: int, head_dim: int, bits: tuple[float, int], max_tokens: int, latent: bool = False
    ) -> Progressive:
        """Return pages of at most 64 channels if `max_tokens` tokens fill 16 of their groups, otherwise of 128.

        Longer groups amortize the header, shorter ones leave fewer tokens outside of pages.
        """
        sizes = (-(-head_dim // -(-head_dim // most)) for most in (64, 128))
        long, short = (cls(page_bytes, head_dim, *bits, m, latent=latent) for m in sizes)
        return long if max_tokens >= 16 * long.T else short
