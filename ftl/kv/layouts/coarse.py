"""Low-bit keys and values: the loops of score pages and value pages (`csd_spec.progressive`).

Rows are FP16 or BF16: `bf16` is True or None in compiled loops, so that each has its own specialization.
"""

from __future__ import annotations

import numpy as np

from csd_io.compiled import njit
from csd_io.rotation import rotate, rotate_back
from csd_spec.arrays import F32, U8, U16
from csd_spec.progressive import DIGITS, LANES, LINE, QUAD, RESTS, Progressive
from ftl.kv.layouts.codes import finite, to_16_bits, to_fp32

STEPS = {2: 1.08, 4: 0.3352}  # step of the MSE-optimal uniform quantizer for a normal distribution, in std deviations
LONGEST = np.float32(2.0**96)  # largest scale of a row of V: sums of rotated rows stay within FP32


@njit(cache=True, nogil=True)
def _ranges(rows, bf16, least, steps):  # type: ignore[no-untyped-def]
    """Minimum and range of each channel of rows (T, m)."""
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
def _assign_digits(steps, left, widths):  # type: ignore[no-untyped-def]
    """Assign each of `left` digits (2 bits) to the channel with the widest step; ties go to the lowest channel.

    Args:
        steps: Range of each channel, (m,); each digit divides it by 4.
        widths: Output: digits of each channel, (m,).
    """
    widths[:] = 0
    while left:
        widest, most = -1, np.float32(0)
        for channel in range(steps.size):
            if steps[channel] > most and widths[channel] < DIGITS:
                widest, most = channel, steps[channel]
        if widest < 0:
            break
        widths[widest] += 1
        steps[widest] *= np.float32(0.25)
        left -= 1


@njit(cache=True, nogil=True)
def _begin(rows, bf16, digits, least, scales, widths):  # type: ignore[no-untyped-def]
    """Compute digits, scales and minimums (pages, m) for rows (pages, t, m)."""
    steps = np.empty(rows.shape[2], np.float32)
    for page in range(rows.shape[0]):
        _ranges(rows[page], bf16, least[page], scales[page])
        steps[:] = scales[page]
        _assign_digits(steps, digits, widths[page])
        for channel in range(steps.size):
            width, whole = widths[page, channel], scales[page, channel]
            scales[page, channel] = whole / np.float32(max((1 << 2 * width) - 1, 1))
            if width == 0:
                least[page, channel] += whole / np.float32(2)


@njit(cache=True, nogil=True, error_model="numpy")
def _put_digits(pages, form, first, rows, header):  # type: ignore[no-untyped-def]
    """Write the digits of rows (pages, t, m) as tokens `first` on."""
    header_bytes, digits, bf16 = form
    scales, least, widths = header
    words = np.empty(digits // LANES, np.uint32)
    for page in range(rows.shape[0]):
        for t in range(rows.shape[1]):
            words[:] = 0
            number = 0
            for channel in range(rows.shape[2]):
                width, scale = widths[page, channel], scales[page, channel]
                most, code = np.float32((1 << 2 * width) - 1), np.float32(0)
                if scale > 0:
                    code = np.rint((finite(rows[page, t, channel], bf16) - least[page, channel]) / scale)
                bits = np.uint32(min(max(code, np.float32(0)), most))
                for _ in range(width):
                    place = number % LANES
                    words[number // LANES] |= (bits & np.uint32(3)) << np.uint32(
                        8 * (place % QUAD) + 2 * (place // QUAD)
                    )
                    bits >>= np.uint32(2)
                    number += 1
            at = header_bytes + (first + t) // LANES * 4 * digits + (first + t) % LANES * QUAD
            for i in range(words.size):
                for j in range(QUAD):
                    pages[page, at + LINE * i + j] = np.uint8(words[i] >> np.uint32(8 * j) & np.uint32(255))


@njit(cache=True, nogil=True, error_model="numpy")
def _code_values(row, bf16, values, codes, levels, step):  # type: ignore[no-untyped-def]
    """Quantize a row; returns the step size in units of the row's largest value, and that value.

    The step is chosen so that the dequantized row has the right projection onto the row: errors of many rows cancel.

    Args:
        values: Output: the rotated row in units of its largest value, (m,).
        codes: Output: codes, (m,).
    """
    top, squares = np.float32(0), np.float32(0)
    for channel in range(row.size):
        values[channel] = finite(row[channel], bf16)
        top = max(top, abs(values[channel]))
    for channel in range(row.size):
        values[channel] = values[channel] / top if top > 0 else np.float32(0)
    rotate(values)
    for channel in range(row.size):
        squares += values[channel] * values[channel]
    unit, middle = step * np.sqrt(squares / np.float32(row.size)), np.float32(levels - 1) / np.float32(2)
    along = np.float32(0)
    for channel in range(row.size):
        code = np.floor(values[channel] / unit + np.float32(levels // 2)) if unit > 0 else np.float32(0)
        code = min(max(code, np.float32(0)), np.float32(levels - 1))
        codes[channel] = np.uint8(code)
        along += values[channel] * (code - middle)
    return squares / along if along > 0 else np.float32(0), top


@njit(cache=True, nogil=True)
def _put_values(pages, form, first, rows, sizes, rests):  # type: ignore[no-untyped-def]
    """Write the codes of rows (pages, t, m) as tokens `first` on.

    Args:
        sizes: Output: step size of each row, (pages, t).
        rests: Output: mean quantization error of each channel, (pages, m).
    """
    header_bytes, bits, step, bf16 = form
    count, m = rows.shape[1:]
    lines, block, mask = (m + LANES - 1) // LANES, QUAD * 8 // bits, np.uint8((1 << bits) - 1)
    values, codes, middle = np.empty(m, np.float32), np.empty(m, np.uint8), np.float32(mask) / np.float32(2)
    for page in range(rows.shape[0]):
        rests[page] = 0
        for t in range(count):
            size, top = _code_values(rows[page, t], bf16, values, codes, 1 << bits, step)
            sizes[page, t] = size * top
            for channel in range(m):
                missed = values[channel] - size * (np.float32(codes[channel]) - middle)
                rests[page, channel] += missed / np.float32(count) * top
            token = (first + t) % block
            shift = np.uint8(token // QUAD * bits)
            at = header_bytes + (first + t) // block * LINE * lines + token % QUAD
            keep = np.uint8(~(mask << shift))
            for channel in range(m):
                place = at + channel // LANES * LINE + channel % LANES * QUAD
                pages[page, place] = pages[page, place] & keep | codes[channel] << shift


def _headers(pages: U8, form: Progressive) -> tuple[F32, F32, U8]:
    """Scales, minimums and digits (pages, m) of score pages (pages, page_bytes)."""
    m = form.m
    parts = (pages[:, 2 * m * i : 2 * m * (i + 1)].copy().view(np.uint16) for i in (0, 1))
    scales, least = (to_fp32(part, form.bf16) for part in parts)
    return scales, least, pages[:, 4 * m : 5 * m]


def begin_scores(pages: U8, form: Progressive, rows: U16) -> None:
    """Write the headers of score pages (pages, page_bytes) for rows (pages, t, m)."""
    least, scales = (np.empty((len(pages), form.m), np.float32) for _ in range(2))
    widths = np.empty((len(pages), form.m), np.uint8)
    _begin(np.ascontiguousarray(rows).view(np.uint16), form.bf16 or None, form.D, least, scales, widths)
    parts = *(to_16_bits(part, form.bf16).view(np.uint8) for part in (scales, least)), widths
    pages[:] = 0
    pages[:, : 5 * form.m] = np.concatenate(parts, axis=1)


def put_scores(pages: U8, form: Progressive, first: int, rows: U16) -> None:
    """Write the codes of rows (pages, t, m) as tokens `first` on; values outside a channel's range are clamped."""
    shape = form.header_bytes, form.D, form.bf16 or None
    _put_digits(pages, shape, first, np.ascontiguousarray(rows).view(np.uint16), _headers(pages, form))


def decode_scores(pages: U8, form: Progressive) -> F32:
    """Dequantize score pages to (pages, T, m); for tests and readers."""
    lines = pages[:, form.header_bytes :][:, : form.T // LANES * 4 * form.D].reshape(
        len(pages), -1, form.D // LANES, 1, LINE
    )
    digits = (lines >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3).reshape(
        len(pages), -1, form.D // LANES, 4, LANES, QUAD
    )
    by_token = digits.transpose(0, 1, 4, 2, 3, 5).reshape(len(pages), form.T, form.D)
    out = np.empty((len(pages), form.T, form.m), np.float32)
    for rows, values, scales, least, widths in zip(by_token, out, *_headers(pages, form), strict=True):
        ends = np.cumsum(widths.astype(int))
        for channel, end in enumerate(ends):
            codes = rows[:, end - widths[channel] : end] @ (1 << 2 * np.arange(widths[channel]))
            values[:, channel] = least[channel] + scales[channel] * codes
    return out


def put_values(pages: U8, form: Progressive, first: int, rows: U16) -> None:
    """Write the codes of rows (pages, t, m) of V into value pages (pages, page_bytes) as tokens `first` on.

    If the rows fill the page, the mean errors of its channels are written, too.
    """
    (count, tokens, m), at = rows.shape, form.sizes_bytes
    sizes, rests = np.empty((count, tokens), np.float32), np.empty((count, m), np.float32)
    shape = form.value_header, form.v_bits, np.float32(STEPS[form.v_bits]), form.bf16 or None
    _put_values(pages, shape, first, np.ascontiguousarray(rows).view(np.uint16), sizes, rests)
    np.minimum(sizes, LONGEST, out=sizes)
    pages.view(np.uint16)[:, first : first + tokens] = to_16_bits(sizes, form.bf16)
    if tokens == form.value_tokens:
        units = RESTS * to_fp32(to_16_bits(sizes, form.bf16), form.bf16).max(1, keepdims=True)
        shares = np.divide(rests, units, out=np.zeros_like(rests), where=units > 0)
        codes = np.rint(np.sqrt(np.minimum(np.abs(np.nan_to_num(shares)), np.float32(127 * 127))))
        pages.view(np.int8)[:, at : at + m] = np.copysign(codes, rests).astype(np.int8)


def decode_values(pages: U8, form: Progressive) -> F32:
    """Dequantize value pages to (pages, value_tokens, m); for tests and readers."""
    count, lines, block, bits = form.value_tokens, form.value_lines, form.value_block, form.v_bits
    body = pages[:, form.value_header :][:, : count // block * lines * LINE]
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes = body.reshape(len(pages), -1, lines, 1, LINE) >> shifts & ((1 << bits) - 1)
    codes = codes.reshape(len(pages), -1, lines, 8 // bits, LANES, QUAD).transpose(0, 1, 3, 5, 2, 4)
    sizes = to_fp32(pages.view(np.uint16)[:, :count], form.bf16)[..., None]
    middle = np.float32((1 << bits) - 1) / np.float32(2)
    codes_of_rests = pages.view(np.int8)[:, form.sizes_bytes :][:, None, : form.m].astype(np.float32)
    rests = RESTS * sizes.max(1, keepdims=True) * codes_of_rests * np.abs(codes_of_rests)
    out: F32 = sizes * (codes.reshape(len(pages), count, -1)[..., : form.m].astype(np.float32) - middle) + rests
    for row in out.reshape(-1, form.m):
        rotate_back(row)
    return out
