"""K and V as codes of few bits: the loops behind pages of progressive precision (`csd_spec.planes`)."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from csd_spec.arrays import F32, U8, U16
from csd_spec.planes import LEAST_EXPONENT, MAX_CODE, MAX_WIDTH, MOST_EXPONENT, Planes


@njit(cache=True, nogil=True)
def _spread(steps, planes, widths):  # type: ignore[no-untyped-def]
    """Give each plane in turn to the channel whose step is widest; steps (m,): the range of each channel's values.

    Steps halve with each bit, so their fractions keep their order: it is enough to go down by powers of two.
    """
    m = steps.size
    fractions, exponents = np.empty(m, np.float32), np.empty(m, np.int64)
    for channel in range(m):
        fraction, exponent = math.frexp(steps[channel])
        fractions[channel], exponents[channel] = -fraction, exponent
    order = np.argsort(fractions, kind="mergesort")  # stable: the lowest channel first among equals
    widths[:] = 0
    for level in range(exponents.max(), exponents.max() - 48, -1):
        for channel in order:
            due = steps[channel] > 0 and exponents[channel] - widths[channel] == level
            if planes and due and widths[channel] < MAX_WIDTH:
                widths[channel] += 1
                planes -= 1


@njit(cache=True, nogil=True)
def _ranges(rows, least, steps):  # type: ignore[no-untyped-def]
    """Least value and range of each channel of rows (T, m)."""
    most = rows[0].copy()
    least[:] = rows[0]
    for t in range(1, rows.shape[0]):
        for channel in range(rows.shape[1]):
            least[channel] = min(least[channel], rows[t, channel])
            most[channel] = max(most[channel], rows[t, channel])
    for channel in range(rows.shape[1]):
        steps[channel] = most[channel] - least[channel]


@njit(cache=True, nogil=True)
def _put(page, form, first, rows, scales, least, widths):  # type: ignore[no-untyped-def]
    """Write the planes of rows (t, m) as tokens `first` on of a page whose planes there are 0."""
    header_bytes, row_bytes = form
    count, m = rows.shape
    codes, plane = np.empty(count, np.uint8), 0
    for channel in range(m):
        most, scale = np.float32((1 << widths[channel]) - 1), scales[channel]
        for t in range(count):
            code = np.rint((rows[t, channel] - least[channel]) / scale) if scale > 0 else np.float32(0)
            codes[t] = np.uint8(min(max(code, np.float32(0)), most))
        for bit in range(widths[channel]):
            row, shift = header_bytes + plane // 4 * row_bytes, plane % 4
            for t in range(count):
                place = first + t
                at = row + place // 32 * 16 + place % 16
                page[at] |= (codes[t] >> bit & 1) << (shift + 4 * (place % 32 // 16))
            plane += 1


@njit(cache=True, nogil=True)
def _forget(page, form, rows, first, tokens):  # type: ignore[no-untyped-def]
    """Clear tokens `first` on of a score page's planes."""
    header_bytes, row_bytes = form
    for row in range(rows):
        for place in range(first, tokens):
            at = header_bytes + row * row_bytes + place // 32 * 16 + place % 16
            page[at] &= 0xF0 if place % 32 < 16 else 0x0F


@njit(cache=True, nogil=True)
def _refine(rows, n, page):  # type: ignore[no-untyped-def]
    """Write rows (n, d) of K or of V: exponents, and codes as (n, d)."""
    exponents, codes = page
    for channel in range(rows.shape[1]):
        most = np.float32(0)
        for t in range(n):
            most = max(most, abs(rows[t, channel]))
        fraction, exponent = math.frexp(most / np.float32(MAX_CODE))
        exponent = exponent - 1 if fraction == 0.5 else exponent  # the least with most <= MAX_CODE x 2^exponent
        exponents[channel] = min(max(exponent if most > 0 else LEAST_EXPONENT, LEAST_EXPONENT), MOST_EXPONENT)
        scale = np.float32(2.0) ** np.float32(-exponents[channel])
        for t in range(n):
            code = np.rint(rows[t, channel] * scale)
            codes[t, channel] = np.int8(min(max(code, np.float32(-MAX_CODE)), np.float32(MAX_CODE)))


def _values(rows: U16) -> F32:
    """FP16 rows as numbers; what is none counts as 0, and infinity as the largest."""
    return np.nan_to_num(rows.view(np.float16)).astype(np.float32)


def _headers(pages: U8, form: Planes) -> tuple[F32, F32, U8]:
    """Scales, least values and widths (pages, m) of score pages (pages, page_bytes)."""
    m = form.m
    scales, least = (pages[:, 2 * m * i : 2 * m * (i + 1)].copy().view(np.float16).astype(np.float32) for i in (0, 1))
    return scales, least, pages[:, 4 * m : 5 * m]


def begin_scores(pages: U8, form: Planes, rows: U16) -> None:
    """Write headers of score pages (pages, page_bytes) for channels whose rows (pages, t, m) are FP16; no planes."""
    values, m = _values(rows), form.m
    least, steps, widths = np.empty(m, np.float32), np.empty(m, np.float32), np.empty(m, np.uint8)
    pages[:] = 0
    for page, mine in zip(pages, values, strict=True):
        _ranges(mine, least, steps)
        _spread(steps, 4 * form.rows, widths)
        levels = np.maximum((1 << widths.astype(np.int64)) - 1, 1)
        scales = np.minimum(steps / levels, np.finfo(np.float16).max).astype(np.float16)
        least[widths == 0] += steps[widths == 0] / 2
        page[: 5 * m] = np.concatenate([scales.view(np.uint8), least.astype(np.float16).view(np.uint8), widths])


def put_scores(pages: U8, form: Planes, first: int, rows: U16) -> None:
    """Add the codes of FP16 rows (pages, t, m) as tokens `first` on; what is beyond a channel's range is cut to it."""
    geometry = form.header_bytes, form.T // 2
    for page, mine, scales, least, widths in zip(pages, _values(rows), *_headers(pages, form), strict=True):
        _put(page, geometry, first, mine, scales, least, widths)


def forget_scores(pages: U8, form: Planes, first: int) -> None:
    """Clear the codes of tokens `first` on."""
    for page in pages:
        _forget(page, (form.header_bytes, form.T // 2), form.rows, first, form.T)


def scored(pages: U8, form: Planes) -> F32:
    """What the codes of score pages stand for, (pages, T, m); for tests and readers."""
    out = np.empty((len(pages), form.T, form.m), np.float32)
    token = np.arange(form.T)
    at, shift = token // 32 * 16 + token % 16, 4 * (token % 32 // 16)
    for page, values, scales, least, widths in zip(pages, out, *_headers(pages, form), strict=True):
        nibbles = page[form.header_bytes :][: form.rows * form.T // 2].reshape(form.rows, -1)[:, at] >> shift & 15
        bits = (nibbles[:, None, :] >> np.arange(4)[:, None] & 1).reshape(-1, form.T)
        ends = np.cumsum(widths.astype(int))
        for channel, end in enumerate(ends):
            codes = (bits[end - widths[channel] : end] << np.arange(widths[channel])[:, None]).sum(0)
            values[:, channel] = least[channel] + scales[channel] * codes
    return out


def refine(pages: U8, rows: U16, d: int) -> None:
    """Write refined pages (pages, page_bytes) of FP16 rows (pages, n, 2 d): those of K, then of V."""
    n = rows.shape[1]
    for page, mine in zip(pages.view(np.int8), _values(rows), strict=True):
        for part in range(2):
            codes = page[2 * d + part * n * d :][: n * d].reshape(n, d)
            _refine(mine[:, part * d : (part + 1) * d], n, (page[part * d : (part + 1) * d], codes))


def refined(pages: U8, n: int, d: int) -> U16:
    """FP16 rows (pages, n, 2 d) of refined pages (pages, page_bytes), exactly what their codes stand for."""
    signed = np.ascontiguousarray(pages).view(np.int8)
    scales = np.exp2(signed[:, : 2 * d].astype(np.float32)).reshape(-1, 2, 1, d)
    codes = signed[:, 2 * d : 2 * d * (n + 1)].reshape(-1, 2, n, d)
    rows = (codes * scales).astype(np.float16)
    return np.ascontiguousarray(rows.transpose(0, 2, 1, 3)).reshape(-1, n, 2 * d).view(np.uint16)
