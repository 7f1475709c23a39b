"""Pages of few-bit K and of K and V in 8 bits, made from numbers, for the tests of the units that read them."""

import numpy as np

from attention_engine.rtl.params import PlaneShape

WIDTHS = ("even", "wide", "narrow first", "none first", "few", "none", "too many", "too wide")


def widths_of(kind: str, numbers: np.random.Generator, shape: PlaneShape) -> np.ndarray:
    """A width for each channel; all but the last four kinds fill the page's planes."""
    d, R = shape.head_dim, shape.planes
    if kind == "even":
        widths = np.full(d, R // d) + (np.arange(d) < R % d)
        return numbers.permutation(np.minimum(widths, 8))
    if kind in ("wide", "narrow first", "none first"):
        widths = np.zeros(d, int) if kind != "narrow first" else np.ones(d, int)
        order = numbers.permutation(d) if kind == "wide" else np.arange(d)[::-1]
        for channel in order:
            widths[channel] += min(8 - widths[channel], R - widths.sum())
        return widths
    if kind == "few":
        return (numbers.random(d) < 0.2) * numbers.integers(1, 3, d)
    if kind == "none":
        return np.zeros(d, int)
    if kind == "too many":
        return np.full(d, 8)
    return np.where(np.arange(d) == d // 2, 200, numbers.integers(0, 2, d))


def score_page(
    shape: PlaneShape, scale: np.ndarray, least: np.ndarray, widths: np.ndarray, codes: np.ndarray
) -> tuple[bytes, np.ndarray]:
    """A page's bytes, and the K (T, d) that it stands for; scale, least: FP16 (d,); codes (T, d): cut to widths."""
    codes = codes & (1 << np.minimum(widths, 8)) - 1
    bits = [codes[:, channel] >> bit & 1 for channel, width in enumerate(widths) for bit in range(min(width, 8))]
    planes = np.ones((shape.planes, shape.tokens), np.uint8)  # those past the last are not to be looked at
    kept = bits[: shape.planes]
    planes[: len(kept)] = np.array(kept).reshape(len(kept), shape.tokens)
    nibbles = (planes.reshape(shape.rows, 4, -1) << np.arange(4).reshape(4, 1)).sum(1).astype(np.uint8)
    blocks = nibbles.reshape(shape.rows, -1, 2, 16)
    body = (blocks[:, :, 0] | blocks[:, :, 1] << 4).tobytes()
    page = scale.tobytes() + least.tobytes() + widths.astype(np.uint8).tobytes() + body
    with np.errstate(invalid="ignore"):
        keys = least.astype(np.float64) + scale.astype(np.float64) * codes
    return page.ljust(shape.page_bytes, b"\xff"), keys


def any_score_page(kind: str, numbers: np.random.Generator, shape: PlaneShape) -> tuple[bytes, np.ndarray]:
    """A page of random K with widths of a kind."""
    d, widths = shape.head_dim, widths_of(kind, numbers, shape)
    least = numbers.normal(-1, 1, d).astype(np.float16)
    scale = (numbers.uniform(0.5, 4, d) / (1 << np.minimum(widths, 8))).astype(np.float16)
    return score_page(shape, scale, least, widths, numbers.integers(0, 256, (shape.tokens, d)))


def refined_page(shape: PlaneShape, exponents: np.ndarray, codes: np.ndarray) -> bytes:
    """exponents (2, d) and codes (2, n, d) of K and V, int8."""
    page = exponents.astype(np.int8).tobytes() + codes.astype(np.int8).tobytes()
    return page.ljust(shape.page_bytes, b"\xff")
