"""Pages of progressive precision: K in few bits to score all tokens by, K and V in 8 bits for the tokens that count.

A *score page* holds m channels of K of one head for T consecutive tokens:

| bytes | what |
|---|---|
| 2 m | scale of each channel, FP16 or BF16 |
| 2 m | least value of each channel, the same |
| m | width of each channel, 0 to 8 bits |
| rows x T / 2 | the planes, four in a row |

A value is least + scale x code. The bits of a channel's code, the lowest first, are its planes, and those of all
channels follow each other. Row i holds planes 4 i to 4 i + 3, a nibble for each token: bit j is of plane 4 i + j. Byte
b of each 16 holds token b of 32 in its low half and token 16 + b in its high half.

A *refined page* holds K and V of n consecutive tokens: an exponent e of each channel of K and then of V (int8), n rows
of int8 codes of K, n rows of V. A value is code x 2^e, so FP16 represents it exactly, or BF16 where rows are of that.
Where V is a part of K the page is of K alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from csd_spec._check import at_least

BLOCK = 32  # tokens of 16 bytes of a row
MAX_T, MAX_WIDTH, BITS = 256, 8, (2, 3, 4)
MAX_CODE = 127
EXPONENTS, EXPONENTS_BF16 = (-24, 9), (-126, 120)  # the least and the most, so that FP16, or BF16, has code x 2^e


@dataclass(frozen=True, slots=True)
class Planes:
    """Their form. bits: of a value of K in score pages, at least and on average, 2 to 4. m: channels of such a page.
    bf16: whether that is what rows and headers are of. latent: whether V is a part of K."""

    page_bytes: int
    head_dim: int
    bits: int
    m: int
    bf16: bool = False
    latent: bool = False

    def __post_init__(self) -> None:
        at_least(1, head_dim=self.head_dim, m=self.m)
        if self.bits not in BITS:
            raise ValueError(f"bits = {self.bits}: scores have 2, 3 or 4 bits a value")
        if self.n < 1 or self.T < BLOCK:
            raise ValueError(f"head_dim = {self.head_dim}: its planes do not fit pages of {self.page_bytes} bytes")

    @classmethod
    def for_context(cls, page_bytes: int, head_dim: int, bits: int, max_tokens: int, latent: bool = False) -> Planes:
        """Score pages of at most 64 channels where their groups fill 16 times over `max_tokens` tokens, else of 128.

        Longer groups spread the cost of a header, shorter ones leave fewer tokens that no score page holds yet.
        """
        sizes = (-(-head_dim // -(-head_dim // most)) for most in (64, 128))
        long, short = (cls(page_bytes, head_dim, bits, m, latent=latent) for m in sizes)
        return long if max_tokens >= 16 * long.T else short

    @property
    def header_bytes(self) -> int:
        """Bytes before the planes of a score page."""
        return 5 * self.m

    @property
    def T(self) -> int:
        """Tokens of a score page."""
        rows = -(-self.bits * self.m // 4)
        return min(MAX_T, 2 * (self.page_bytes - self.header_bytes) // rows // BLOCK * BLOCK)

    @property
    def rows(self) -> int:
        """Rows of four planes of a score page; no channel has more than 8 bits."""
        return min((self.page_bytes - self.header_bytes) // (self.T // 2), 2 * self.m)

    @property
    def parts(self) -> int:
        """What a refined page holds of each token: a row of K, and one of V where that is no part of it."""
        return 2 - self.latent

    @property
    def n(self) -> int:
        """Tokens of a refined page."""
        return self.page_bytes // (self.parts * self.head_dim) - 1

    @property
    def buffers(self) -> int:
        """Page buffers that rows of a group, 2 bytes a value, wait in until it is full: 2 where V is a part of K."""
        return -(-2 * self.n * self.head_dim // self.page_bytes)

    @property
    def waiting(self) -> int:
        """Tokens whose rows wait in one of them."""
        return -(-self.n // self.buffers)
