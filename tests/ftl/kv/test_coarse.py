"""Low-bit codes: their error on keys and values of any kind.

partner of: ftl/kv/layouts/coarse.py
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csd_io.rotation import rotate, rotate_back
from csd_spec.progressive import LANES, LINE, QUAD, RESTS, Progressive
from ftl.kv.layouts.coarse import begin_scores, decode_scores, decode_values, put_scores, put_values
from ftl.kv.layouts.codes import to_fp32
from tests.ftl.kv.low_bit_pages import any_values, as_bits, form_of, score_page, value_page, values_of
from tests.properties import examples

SMALL = Progressive.for_context(512, 16, (2.5, 2), 128)
SEEDS = st.integers(0, 1 << 32)
KINDS = pytest.mark.parametrize("bf16", [False, True])
V_BITS = pytest.mark.parametrize("v_bits", [2, 4])
HEADS = pytest.mark.parametrize("d", [64, 80, 96, 128, 3])
MISSED = {2: 0.36, 4: 0.103}  # of a normal row's length


def widths_of(pages, form):
    return pages[0, 4 * form.m : 5 * form.m].astype(int)


@KINDS
@settings(max_examples=examples(60))
@given(seed=SEEDS)
def test_score_of_any_value_is_within_half_a_step(bf16, seed):
    """Outliers and subnormals too; a step is rounded to FP16 itself, or up to BF16. A channel without digits stands for
    one of its values."""
    rows, form = any_values(seed, SMALL.T, SMALL.m, bf16=bf16), replace(SMALL, bf16=bf16)
    pages, values = score_page(rows, form), values_of(rows, bf16)
    levels = 1 << 2 * widths_of(pages, form)
    spans = values.max(0) - values.min(0)
    steps = np.where(levels > 1, spans / np.maximum(levels - 1, 1), 2 * spans)
    if bf16:
        slack = steps * 2.0**-8 + 2.0**-133 * levels + np.abs(values).max(0) * 2.0**-22
    else:
        slack = spans * 2.0**-10 + 2.0**-24 * levels
    got = decode_scores(pages, form)[0]
    assert np.isfinite(got).all() and (np.abs(got - values) <= steps / 2 + slack).all()


@pytest.mark.parametrize(("d", "v_bits"), [(16, 2), (80, 2), (96, 4), (3, 4)])
def test_widest_channels_get_the_digits(d, v_bits):
    form, generator = form_of(d, v_bits), np.random.default_rng(0)
    rows = generator.standard_normal((form.T, form.m)).astype(np.float32) * np.exp(generator.standard_normal(form.m))
    rows[:, 0] *= 1000
    rows[:, 2] = 7
    page = score_page(as_bits(rows, False), form)
    widths, spans = widths_of(page, form), np.ptp(rows.astype(np.float16).astype(float), axis=0)
    assert widths.sum() == min(form.D, 4 * (form.m - 1)) and widths.max() <= 4 and widths[2] == 0
    for wide in np.flatnonzero(widths):  # its last digit went where the step was widest
        open_ = widths < 4
        assert (spans[open_] / 4.0 ** widths[open_] <= spans[wide] / 4.0 ** (widths[wide] - 1) * 1.0001).all()
    assert (decode_scores(page, form)[0][:, 2] == 7).all(), "what does not vary is exact without any"


def test_digits_are_at_positions_of_the_format():
    """Byte 4 t + j of line i has digits 16 i + 4 s + j of token t at bit 2 s."""
    form = form_of(64)
    page = score_page(as_bits(np.random.default_rng(1).standard_normal((form.T, 64)), False), form)
    widths, values = widths_of(page, form), decode_scores(page, form)[0]
    scales, least = (to_fp32(page[0, 128 * i : 128 * (i + 1)].view(np.uint16), False) for i in (0, 1))
    codes = np.rint((values - least) / np.where(widths > 0, scales, np.inf)).astype(int)
    for token, channel in ((0, 0), (17, 5), (form.T - 1, 63), (40, 31)):
        code = 0
        for level in range(widths[channel]):
            digit = widths[:channel].sum() + level
            line, place = divmod(digit, LANES)
            block, t = divmod(token, LANES)
            at = form.header_bytes + (block * (form.D // LANES) + line) * LINE + QUAD * t + place % QUAD
            code |= (int(page[0, at]) >> 2 * (place // QUAD) & 3) << 2 * level
        assert code == codes[token, channel]


@KINDS
@HEADS
@V_BITS
def test_scores_written_in_parts_equal_whole(d, v_bits, bf16):
    form, generator = form_of(d, v_bits, bf16), np.random.default_rng(2)
    rows = as_bits(generator.standard_normal((2, form.T, d)), bf16)
    whole, pieces = (np.empty((2, form.page_bytes), np.uint8) for _ in range(2))
    for pages in (whole, pieces):
        begin_scores(pages, form, rows)
    put_scores(whole, form, 0, rows)
    for first, last in zip((0, 1, 7, 16, 30, 33), (1, 7, 16, 30, 33, form.T), strict=True):
        put_scores(pieces, form, first, rows[:, first:last])
    np.testing.assert_array_equal(pieces, whole)
    put_scores(pieces, form, 5, rows[:, 9:20])
    put_scores(pieces, form, 5, rows[:, 5:16])
    np.testing.assert_array_equal(pieces, whole, "what was there before is overwritten")


def test_scores_beyond_range_are_clipped():
    form, generator = form_of(64), np.random.default_rng(3)
    rows = generator.standard_normal((form.T, 64)).astype(np.float16)
    pages = np.empty((1, form.page_bytes), np.uint8)
    begin_scores(pages, form, rows[None, :40].view(np.uint16))
    put_scores(pages, form, 0, rows[None, :40].view(np.uint16))
    before = decode_scores(pages, form)[0, :40].copy()
    put_scores(pages, form, 40, (100 * rows[None, 40:50]).view(np.uint16))
    got = decode_scores(pages, form)[0]
    np.testing.assert_array_equal(got[:40], before)
    least, most = rows[:40].min(0), rows[:40].max(0)
    slack, coded = np.ptp(rows[:40].astype(float), axis=0) / 1000, widths_of(pages, form) > 0
    wanted = np.clip(100 * rows[40:50].astype(float), least, most)
    beyond = (np.abs(100 * rows[40:50].astype(float)) > 20) & coded
    assert beyond.any() and (np.abs(got[40:50] - wanted) <= slack)[beyond].all()


@KINDS
@pytest.mark.parametrize("d", [64, 80, 96, 128])
@V_BITS
def test_value_error_of_normal_rows_is_as_expected(d, v_bits, bf16):
    form = form_of(d, v_bits, bf16)
    bits = as_bits(np.random.default_rng(5).standard_normal((form.value_tokens, d)), bf16)
    rows = values_of(bits, bf16)
    missed = decode_values(value_page(bits, form), form)[0] - rows
    share = np.sqrt((missed**2).sum() / (rows**2).sum())
    assert abs(share / MISSED[v_bits] - 1) < 0.05
    outlier = rows.copy()
    outlier[:, 5] *= 20
    missed = decode_values(value_page(as_bits(outlier, bf16), form), form)[0] - values_of(as_bits(outlier, bf16), bf16)
    assert np.sqrt((missed**2).sum() / (outlier**2).sum()) < 1.6 * MISSED[v_bits], "rotation spreads it"


@KINDS
@pytest.mark.parametrize("d", [64, 80, 96, 128])
@V_BITS
@pytest.mark.parametrize("mean", [0, 2])
def test_mean_of_full_page_is_exact_within_residual(d, v_bits, bf16, mean):
    """A rest's code c is the nearest: it misses at most (c + 1/4) / 2048 of the largest size, and sizes are rounded."""
    form, generator = form_of(d, v_bits, bf16), np.random.default_rng(6)
    shifts = mean * generator.standard_normal(d)
    bits = as_bits(generator.standard_normal((form.value_tokens, d)) + shifts, bf16)
    page, m = value_page(bits, form), form.m
    codes = np.abs(page.view(np.int8)[0, form.sizes_bytes : form.sizes_bytes + m].astype(float))
    sizes = to_fp32(page.view(np.uint16)[0, : form.value_tokens], bf16)
    missed = (decode_values(page, form)[0] - values_of(bits, bf16)).mean(0).astype(np.float32)
    rotate(missed)
    unit = float(RESTS) * sizes.max()
    rounding = sizes.mean() * 2.0 ** (v_bits - 1) * 2.0 ** (-8 if bf16 else -11)
    assert codes.max() > 0 and (np.abs(missed) <= (codes + 0.26) * unit + rounding).all()
    without = page.copy()
    without[:, form.sizes_bytes : form.value_header] = 0
    plain = (decode_values(without, form)[0] - values_of(bits, bf16)).mean(0)
    assert np.linalg.norm(missed) < 0.5 * np.linalg.norm(plain), "rests take most of it"


@KINDS
@V_BITS
@settings(max_examples=examples(40))
@given(seed=SEEDS)
def test_value_of_any_row_is_finite_and_within_bound(v_bits, bf16, seed):
    """Zeros, huge and tiny rows, outliers, BF16 near the end of its range: the error is at most the row's length, not
    counting the rest, which is a fraction of the page's longest row. A size is at least FP16's smallest, and below
    2^96.
    """
    form, longest = form_of(16, v_bits, bf16, 512), 2.0**96 if bf16 else 65504
    rows = any_values(seed, form.value_tokens, 16, bf16=bf16)
    rows[3], rows[5] = 0, 0x7F7F if bf16 else 0x7BFF
    values, page = values_of(rows, bf16), value_page(rows, form)
    got, sizes = (
        decode_values(page, form)[0].astype(np.float64),
        to_fp32(page.view(np.uint16)[0, : form.value_tokens], bf16),
    )
    assert np.isfinite(got).all() and sizes[3] == 0 and 2**14 < sizes[5] <= sizes.max() <= longest
    codes = page.view(np.int8)[0, form.sizes_bytes : form.sizes_bytes + 16].astype(float)
    rest = (codes * np.abs(codes)).astype(np.float32)
    rotate_back(rest)
    error, length = (
        np.linalg.norm(each, axis=1) for each in (got - rest * float(RESTS) * sizes.max() - values, values)
    )
    assert (error <= 1.01 * length + 1e-6 * length.max() + 2.0**-22).all()


@pytest.mark.parametrize("d", [64, 128])
@V_BITS
def test_long_rows_leave_others_of_their_page_finite(d, v_bits):
    form = form_of(d, v_bits, bf16=True)
    rows = as_bits(np.random.default_rng(9).standard_normal((form.value_tokens, d)), True)
    rows[5] = 0x7F7F
    got = decode_values(value_page(rows, form), form)[0]
    assert np.isfinite(got).all() and np.abs(got).max() < 2.0**110


@KINDS
@V_BITS
def test_page_of_zeros_decodes_to_zeros(v_bits, bf16):
    form = form_of(64, v_bits, bf16)
    bits = np.zeros((form.value_tokens, 64), np.uint16)
    assert (decode_values(value_page(bits, form), form) == 0).all()
    bits[7] = as_bits(np.random.default_rng(7).standard_normal(64), bf16)
    got = decode_values(value_page(bits, form), form)[0]
    assert np.abs(np.delete(got, 7, 0)).max() < 0.05, "but for the rest that the one leaves"
    assert np.linalg.norm(got[7] - to_fp32(bits[7], bf16)) < 0.5 * np.linalg.norm(to_fp32(bits[7], bf16))


@KINDS
@HEADS
@V_BITS
def test_values_written_in_parts_equal_whole(d, v_bits, bf16):
    """But for rests, which full pages alone have."""
    form, generator = form_of(d, v_bits, bf16), np.random.default_rng(8)
    rows = as_bits(generator.standard_normal((2, form.value_tokens, d)), bf16)
    whole, pieces = (np.zeros((2, form.page_bytes), np.uint8) for _ in range(2))
    put_values(whole, form, 0, rows)
    for first, last in zip((0, 1, 7, 16, 30), (1, 7, 16, 30, form.value_tokens), strict=True):
        put_values(pieces, form, first, rows[:, first:last])
    put_values(pieces, form, 5, rows[:, 9:20])
    put_values(pieces, form, 5, rows[:, 5:16])
    rests = slice(form.sizes_bytes, form.value_header)
    assert whole[:, rests].any() and not pieces[:, rests].any()
    pieces[:, rests] = whole[:, rests]
    np.testing.assert_array_equal(pieces, whole)
