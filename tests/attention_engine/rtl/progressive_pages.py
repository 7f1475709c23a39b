"""Pages of progressive precision built from random numbers, for tests of the units that read them."""

import numpy as np

from attention_engine.rtl.golden_engine import GoldenPages
from attention_engine.rtl.params import ProgressiveShape
from csd_spec.progressive import DIGITS, LANES, QUAD
from ftl.kv.layouts.coarse import begin_scores, put_scores, put_values

WIDTHS = ("even", "wide", "late", "few", "none", "too many", "too wide")


def widths_of(kind: str, numbers: np.random.Generator, shape: ProgressiveShape) -> np.ndarray:
    """Digits of each channel; all but the last four kinds fill the page's digits."""
    m, D = shape.m, shape.form.D
    if kind == "even":
        return numbers.permutation(np.minimum(D // m + (np.arange(m) < D % m), DIGITS))
    if kind in ("wide", "late"):
        widths = np.zeros(m, int)
        for channel in numbers.permutation(m) if kind == "wide" else np.arange(m)[::-1]:
            widths[channel] = min(DIGITS, D - widths.sum())
        return widths
    if kind == "few":
        return (numbers.random(m) < 0.2) * numbers.integers(1, 3, m)
    if kind == "none":
        return np.zeros(m, int)
    if kind == "too many":
        return np.full(m, DIGITS)
    return np.where(np.arange(m) == m // 2, 200, numbers.integers(0, 2, m))


def packed(digits: np.ndarray) -> bytes:
    """Lines of digits (tokens, D), 2 bits each."""
    parts = digits.reshape(-1, LANES, digits.shape[1] // LANES, 4, QUAD).transpose(0, 2, 1, 4, 3)
    return (parts.astype(np.uint8) << np.arange(0, 8, 2, dtype=np.uint8)).sum(-1, dtype=np.uint8).tobytes()


def score_page(
    shape: ProgressiveShape, scale: np.ndarray, least: np.ndarray, widths: np.ndarray, codes: np.ndarray
) -> tuple[bytes, np.ndarray]:
    """A page's bytes, and the K (T, m) that it stands for; scale, least: FP16 (m,); codes (T, m): cut to widths."""
    form, kept = shape.form, np.minimum(widths, DIGITS)
    codes = codes & (1 << 2 * kept) - 1
    digits = np.full((form.T, form.D), 3)  # those past the last are not to be looked at
    parts = [codes[:, c] >> 2 * level & 3 for c, width in enumerate(kept) for level in range(width)][: form.D]
    digits[:, : len(parts)] = np.array(parts).reshape(len(parts), form.T).T
    head = scale.tobytes() + least.tobytes() + widths.astype(np.uint8).tobytes()
    page = head.ljust(form.header_bytes, b"\xff") + packed(digits)
    with np.errstate(invalid="ignore"):
        keys = least.astype(np.float64) + scale.astype(np.float64) * codes
    return page.ljust(shape.page_bytes, b"\xff"), keys


def any_score_page(kind: str, numbers: np.random.Generator, shape: ProgressiveShape) -> tuple[bytes, np.ndarray]:
    """A page of random K with digits of a kind."""
    m, widths = shape.m, widths_of(kind, numbers, shape)
    least = numbers.normal(-1, 1, m).astype(np.float16)
    scale = (numbers.uniform(0.5, 4, m) / (1 << 2 * np.minimum(widths, DIGITS))).astype(np.float16)
    return score_page(shape, scale, least, widths, numbers.integers(0, 256, (shape.form.T, m)))


def value_page(shape: ProgressiveShape, sizes: np.ndarray, codes: np.ndarray) -> bytes:
    """sizes: FP16 (tokens,); codes (tokens, m) of V."""
    form = shape.form
    parts = codes.reshape(-1, 8 // form.v_bits, QUAD, form.value_lines, LANES).transpose(0, 3, 4, 2, 1)
    body = (parts.astype(np.uint8) << np.arange(0, 8, form.v_bits, dtype=np.uint8)).sum(-1, dtype=np.uint8).tobytes()
    return (sizes.tobytes().ljust(form.value_header, b"\xff") + body).ljust(shape.page_bytes, b"\xff")


def any_value_page(numbers: np.random.Generator, shape: ProgressiveShape) -> bytes:
    """A page of random V."""
    form = shape.form
    sizes = numbers.uniform(0.1, 1, form.value_tokens).astype(np.float16)
    return value_page(shape, sizes, numbers.integers(0, 1 << form.v_bits, (form.value_tokens, shape.m)))


def head_pages(shape: ProgressiveShape, K: np.ndarray, V: np.ndarray) -> GoldenPages:
    """All pages of K and V (S, d), FP16, as the layout writes score and value pages; the last ones are cut short."""
    form, m, S = shape.form, shape.m, len(K)

    def written(rows, size, write):
        groups = []
        for first in range(0, S, size):
            group = []
            for part in range(shape.parts):
                page = np.zeros((1, shape.page_bytes), np.uint8)
                write(page, np.ascontiguousarray(rows[None, first : first + size, part * m : (part + 1) * m]))
                group.append(page.tobytes())
            groups.append(group)
        return groups

    def score(page, rows):
        begin_scores(page, form, rows.view(np.uint16))
        put_scores(page, form, 0, rows.view(np.uint16))

    refined, n = [], shape.refined
    for first in range(0, S, n):
        codes, exponents = np.full((2, n, shape.head_dim), -128), (np.full(shape.head_dim, 100), np.full(n, 100))
        for i, part in enumerate((K, V)):
            rows = part[first : first + n].astype(np.float64)
            scales = np.ceil(np.log2(np.maximum(abs(rows).max(i), 2.0**-24) / 127)).clip(-24, 9)
            exponents[i][: len(scales)] = scales
            codes[i, : len(rows)] = np.rint(rows / 2.0 ** (scales[:, None] if i else scales)).clip(-127, 127)
        refined.append(refined_page(shape, *exponents, codes))
    values = written(V, form.value_tokens, lambda page, rows: put_values(page, form, 0, rows.view(np.uint16)))
    return GoldenPages(written(K, form.T, score), refined, values)


def refined_page(shape: ProgressiveShape, of_k: np.ndarray, of_v: np.ndarray, codes: np.ndarray) -> bytes:
    """Exponents (d,) of K and (n,) of V, and codes (2, n, d) of both, int8."""
    header = of_k.astype(np.int8).tobytes() + of_v.astype(np.int8).tobytes()
    page = header.ljust(shape.form.refined_header, b"\0") + codes.astype(np.int8).tobytes()
    return page.ljust(shape.page_bytes, b"\xff")
