"""K and V as codes of few bits: the loops behind pages of progressive precision (`csd_spec.planes`).

Rows are FP16, or BF16: to compiled loops `bf16` is True or None, so that each has loops of its own.
"""

from __future__ import annotations

import math

import numpy as np

from csd_io.compiled import njit
from csd_spec.arrays import F32, U8, U16
from csd_spec.planes import EXPONENTS, EXPONENTS_BF16, MAX_CODE, MAX_WIDTH, Planes

MAX_HALF, MAX_BRAIN = np.float32(np.finfo(np.float16).max), np.float32(MAX_CODE * 2.0 ** EXPONENTS_BF16[1])
_FURTHER = np.float32(2.0**112)


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
        if not planes:
            break
        for channel in order:
            due = steps[channel] > 0 and exponents[channel] - widths[channel] == level
            if planes and due and widths[channel] < MAX_WIDTH:
                widths[channel] += 1
                planes -= 1


@njit(cache=True, nogil=True)
def finite(bits, bf16):  # type: ignore[no-untyped-def]
    """The FP32 value of bits; what is no number counts as 0, and infinity as the largest. So does what is beyond 2^127,
    nearly, in BF16: then no range is an error.

    FP16's exponent and fraction are FP32's, 112 smaller and 13 bits on; subnormals come right by the product.
    """
    size = np.uint32(bits) & np.uint32(0x7FFF)
    if bf16 is not None:
        value = min(np.uint32(size << np.uint32(16)).view(np.float32), MAX_BRAIN)
        value = value if size <= np.uint32(0x7F80) else np.float32(0)
    else:
        value = min(np.uint32(size << np.uint32(13)).view(np.float32) * _FURTHER, MAX_HALF)
        value = value if size <= np.uint32(0x7C00) else np.float32(0)
    return -value if bits & np.uint16(0x8000) else value


def widened(bits: U16, bf16: bool) -> F32:
    """The FP32 values of bits."""
    if not bf16:
        return bits.view(np.float16).astype(np.float32)
    wide: F32 = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return wide


def narrowed(values: F32, bf16: bool) -> U16:
    """Values in 2 bytes: FP16 to the nearest, BF16 away from 0, so that no scale leaves a channel's largest value
    without a code."""
    if not bf16:
        return np.minimum(values, MAX_HALF).astype(np.float16).view(np.uint16)
    bits: U16 = (values.view(np.uint32) + np.uint32(0xFFFF) >> np.uint32(16)).astype(np.uint16)
    return bits


@njit(cache=True, nogil=True)
def _ranges(rows, bf16, least, steps):  # type: ignore[no-untyped-def]
    """Least value and range of each channel of rows (T, m)."""
    most = np.empty(rows.shape[1], np.float32)
    least[:], most[:] = np.inf, -np.inf
    for t in range(rows.shape[0]):
        for channel in range(rows.shape[1]):
            value = finite(rows[t, channel], bf16)
            least[channel] = min(least[channel], value)
            most[channel] = max(most[channel], value)
    for channel in range(rows.shape[1]):
        steps[channel] = most[channel] - least[channel]


@njit(cache=True, nogil=True)
def _begin(rows, bf16, planes, least, scales, widths):  # type: ignore[no-untyped-def]
    """Widths, scales and least values (pages, m) for rows (pages, t, m)."""
    steps = np.empty(rows.shape[2], np.float32)
    for page in range(rows.shape[0]):
        _ranges(rows[page], bf16, least[page], steps)
        _spread(steps, planes, widths[page])
        for channel in range(steps.size):
            width = widths[page, channel]
            scales[page, channel] = steps[channel] / np.float32(max((1 << width) - 1, 1))
            if width == 0:
                least[page, channel] += steps[channel] / np.float32(2)


@njit(cache=True, nogil=True, error_model="numpy")
def _encode(rows, bf16, scales, least, widths, codes):  # type: ignore[no-untyped-def]
    """Codes (m, t) of rows (t, m)."""
    count, m = rows.shape
    most = np.empty(m, np.float32)
    for channel in range(m):
        most[channel] = np.float32((1 << widths[channel]) - 1) if scales[channel] > 0 else np.float32(0)
    line = np.empty(m, np.float32)
    for t in range(count):
        for channel in range(m):
            code = np.rint((finite(rows[t, channel], bf16) - least[channel]) / scales[channel])
            line[channel] = min(max(code, np.float32(0)), most[channel]) if most[channel] > 0 else np.float32(0)
        for channel in range(m):
            codes[channel, t] = np.uint8(line[channel])


@njit(cache=True, nogil=True)
def _merge(row, at, shift, nibbles):  # type: ignore[no-untyped-def]
    """Add the nibbles of tokens to a row, where they are 0, and begin anew."""
    for t in range(nibbles.size):
        row[at[t]] |= nibbles[t] << shift[t]
    nibbles[:] = 0


@njit(cache=True, nogil=True)
def _put(pages, form, first, rows, header):  # type: ignore[no-untyped-def]
    """Write the planes of rows (pages, t, m) as tokens `first` on of pages whose planes there are 0."""
    header_bytes, row_bytes, bf16 = form
    count, m = rows.shape[1:]
    codes, (scales, least, widths) = np.empty((m, count), np.uint8), header
    at, shift = np.empty(count, np.int64), np.empty(count, np.uint8)
    for t in range(count):
        place = first + t
        at[t], shift[t] = header_bytes + place // 32 * 16 + place % 16, place % 32 // 16 * 4
    nibbles = np.zeros(count, np.uint8)
    for page in range(rows.shape[0]):
        _encode(rows[page], bf16, scales[page], least[page], widths[page], codes)
        plane = 0
        for channel in range(m):
            bit = 0
            while bit < widths[page, channel]:  # what of it lies in a row, at once
                some = min(4 - plane % 4, widths[page, channel] - bit)
                mask, place, by = np.uint8((1 << some) - 1), np.uint8(plane % 4), np.uint8(bit)
                for t in range(count):
                    nibbles[t] |= np.uint8(np.uint8(codes[channel, t] >> by) & mask) << place
                bit += some
                plane += some
                if plane % 4 == 0:
                    _merge(pages[page, (plane // 4 - 1) * row_bytes :], at, shift, nibbles)
        if plane % 4:
            _merge(pages[page, plane // 4 * row_bytes :], at, shift, nibbles)


@njit(cache=True, nogil=True)
def _forget(page, form, rows, first, tokens):  # type: ignore[no-untyped-def]
    """Clear tokens `first` on of a score page's planes."""
    header_bytes, row_bytes = form
    for row in range(rows):
        for place in range(first, tokens):
            at = header_bytes + row * row_bytes + place // 32 * 16 + place % 16
            page[at] &= 0xF0 if place % 32 < 16 else 0x0F


@njit(cache=True, nogil=True)
def _refine(rows, bf16, parts, pages):  # type: ignore[no-untyped-def]
    """Write refined pages of rows (pages, n, parts x d): exponents, codes of each part."""
    lowest, highest = EXPONENTS_BF16 if bf16 is not None else EXPONENTS
    count, n, channels = rows.shape
    d, most, scales = channels // parts, np.empty(channels, np.float32), np.empty(channels, np.float32)
    for page in range(count):
        most[:] = 0
        for t in range(n):
            for channel in range(channels):
                most[channel] = max(most[channel], abs(finite(rows[page, t, channel], bf16)))
        for channel in range(channels):
            fraction, exponent = math.frexp(most[channel] / np.float32(MAX_CODE))
            exponent -= fraction == 0.5  # the least with most <= MAX_CODE x 2^exponent
            exponent = min(max(exponent if most[channel] > 0 else lowest, lowest), highest)
            pages[page, channel], scales[channel] = exponent, np.float32(math.ldexp(1.0, -exponent))
        for t in range(n):
            for part in range(parts):
                codes = pages[page, channels + (part * n + t) * d : channels + (part * n + t + 1) * d]
                for channel in range(d):
                    code = np.rint(finite(rows[page, t, part * d + channel], bf16) * scales[part * d + channel])
                    codes[channel] = np.int8(min(max(code, np.float32(-MAX_CODE)), np.float32(MAX_CODE)))


def _headers(pages: U8, form: Planes) -> tuple[F32, F32, U8]:
    """Scales, least values and widths (pages, m) of score pages (pages, page_bytes)."""
    m = form.m
    parts = (pages[:, 2 * m * i : 2 * m * (i + 1)].copy().view(np.uint16) for i in (0, 1))
    scales, least = (widened(part, form.bf16) for part in parts)
    return scales, least, pages[:, 4 * m : 5 * m]


def begin_scores(pages: U8, form: Planes, rows: U16) -> None:
    """Write headers of score pages (pages, page_bytes) for channels whose rows are (pages, t, m); no planes."""
    least, scales = (np.empty((len(pages), form.m), np.float32) for _ in range(2))
    widths = np.empty((len(pages), form.m), np.uint8)
    _begin(np.ascontiguousarray(rows).view(np.uint16), form.bf16 or None, 4 * form.rows, least, scales, widths)
    parts = *(narrowed(part, form.bf16).view(np.uint8) for part in (scales, least)), widths
    pages[:] = 0
    pages[:, : form.header_bytes] = np.concatenate(parts, axis=1)


def put_scores(pages: U8, form: Planes, first: int, rows: U16) -> None:
    """Add the codes of rows (pages, t, m) as tokens `first` on; what is beyond a channel's range is cut to it."""
    _put(
        pages,
        (form.header_bytes, form.T // 2, form.bf16 or None),
        first,
        np.ascontiguousarray(rows).view(np.uint16),
        _headers(pages, form),
    )


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


def refine(pages: U8, form: Planes, rows: U16) -> None:
    """Write refined pages (pages, page_bytes) of rows (pages, n, parts x d): those of K, then of V."""
    _refine(np.ascontiguousarray(rows).view(np.uint16), form.bf16 or None, form.parts, pages.view(np.int8))


def refined(pages: U8, form: Planes) -> U16:
    """Rows (pages, n, parts x d) of refined pages (pages, page_bytes), exactly what their codes stand for."""
    signed, n, width = np.ascontiguousarray(pages).view(np.int8), form.n, form.parts * form.head_dim
    scales = np.exp2(signed[:, :width].astype(np.float32)).reshape(-1, form.parts, 1, form.head_dim)
    codes = signed[:, width : width * (n + 1)].reshape(-1, form.parts, n, form.head_dim)
    rows = narrowed(np.multiply(codes, scales, dtype=np.float32), form.bf16)
    return np.ascontiguousarray(rows.transpose(0, 2, 1, 3)).reshape(-1, n, width)
