"""Golden models of the units for few-bit K against float64."""

import math

import numpy as np
import pytest
from plane_pages import WIDTHS, any_score_page, refined_page, score_page

from attention_engine.rtl.golden import fp16_units
from attention_engine.rtl.golden_planes import fp16_parts, int8_unpack, int8_value, plane_scores
from attention_engine.rtl.params import LOG2_E, PlaneShape

SHAPES = [PlaneShape(head_dim=d, q_heads=2) for d in (64, 128)]


def test_parts_of_a_value_are_the_value():
    for bits in range(1 << 16):
        sig, shift = fp16_parts(bits)
        assert (-1 if bits >> 15 else 1) * (sig << shift) == fp16_units(bits) and sig < 2048


def test_8_bits_are_exactly_fp16():
    for exponent in range(-24, 10):
        for code in range(-127, 128):
            got = np.uint16(int8_value(code, exponent)).view(np.float16)
            assert float(got) == math.ldexp(code, exponent)
    assert int8_value(-128, 8) == 0xF800 and int8_value(-128, 9) == 0xFC00
    assert int8_value(0, 10) == int8_value(5, -25) == 0x7E00


@pytest.mark.parametrize("shape", SHAPES, ids=["64", "128"])
def test_a_page_of_8_bits_is_unpacked(shape):
    numbers = np.random.default_rng(1)
    exponents = numbers.integers(-24, 10, (2, shape.head_dim))
    codes = numbers.integers(-127, 128, (2, shape.refined, shape.head_dim))
    got = int8_unpack(refined_page(shape, exponents, codes), shape)
    assert np.array_equal(got.view(np.float16), np.ldexp(codes.astype(float), exponents[:, None]))


def test_the_sizes_of_pages():
    small, large = SHAPES
    assert (small.tokens, small.rows, small.planes, small.refined, small.header_bytes) == (224, 33, 132, 31, 320)
    assert (large.tokens, large.rows, large.planes, large.refined, large.header_bytes) == (96, 72, 288, 15, 640)


def bound(q, scale, least, widths):
    """The largest error of a score in log2 units: products, q x factor (24 bits) and the score are rounded."""
    codes = (1 << np.minimum(widths, 8)) - 1
    factor = LOG2_E / math.sqrt(len(q))
    sizes = np.maximum(abs(q.astype(float)), 2**-14) * factor * (abs(least.astype(float)) + scale.astype(float) * codes)
    return (codes.sum() + len(q)) * 2**-27 + sizes.sum() * 2**-23 + 2**-21


@pytest.mark.parametrize("kind", WIDTHS[:6])
@pytest.mark.parametrize("shape", SHAPES, ids=["64", "128"])
def test_scores_are_those_of_float64(shape, kind):
    numbers = np.random.default_rng(2)
    q = numbers.normal(0, 2, (2, shape.head_dim)).astype(np.float16)
    page, keys = any_score_page(kind, numbers, shape)
    got = plane_scores(q.view(np.uint16), page, shape.tokens, shape)
    want = q.astype(np.float64) @ keys.T * LOG2_E / math.sqrt(shape.head_dim)
    head = np.frombuffer(page, np.float16, 2 * shape.head_dim).reshape(2, -1)
    widths = np.frombuffer(page, np.uint8)[4 * shape.head_dim : shape.header_bytes].astype(int)
    off = abs(got.x / 2.0**20 - want).max(1)
    assert all(off <= [bound(row, *head, widths) for row in q])
    assert off.max() < 1e-5 and not got.bad and not got.over.any()


def test_what_cannot_be_is_told():
    shape, numbers = PlaneShape(head_dim=16, page_bytes=512), np.random.default_rng(3)
    q = np.full((1, 16), 0x3C00, np.uint16)
    for kind in WIDTHS:
        page, _ = any_score_page(kind, numbers, shape)
        assert plane_scores(q, page, 5, shape).bad == kind.startswith("too")
    widths, codes = np.array([2] * 8 + [0] * 8), numbers.integers(0, 4, (shape.tokens, 16))
    scale, least = np.full(16, 0.5, np.float16), np.full(16, -1, np.float16)
    plain = plane_scores(q, score_page(shape, scale, least, widths, codes)[0], 9, shape)
    for channel, told in ((3, True), (12, False)):  # the scale of a channel without bits is not looked at
        broken, zeros = scale.copy(), scale.copy()
        broken[channel], zeros[channel] = np.nan, 0
        got = plane_scores(q, score_page(shape, broken, least, widths, codes)[0], 9, shape)
        want = plane_scores(q, score_page(shape, zeros, least, widths, codes)[0], 9, shape)
        assert got.bad == told and np.array_equal(got.x, want.x) and np.array_equal(got.x, plain.x) != told
    q[0, 15] = 0xFC00
    assert plane_scores(q, score_page(shape, scale, least, widths, codes)[0], 9, shape).bad


def test_beyond_the_range_scores_saturate():
    shape = PlaneShape(head_dim=16, page_bytes=512)
    q, none = np.full((1, 16), 0x5640, np.uint16), np.zeros(16, np.float16)
    codes = np.repeat(np.arange(shape.tokens).reshape(-1, 1) % 2, 16, 1)
    page, keys = score_page(shape, np.full(16, 100, np.float16), none, np.ones(16, int), codes)
    got = plane_scores(q, page, 96, shape)
    assert keys[1].sum() * 100 * LOG2_E / 4 > 2048
    assert np.array_equal(got.over[0], codes[:96, 0] == 1) and got.x[0, 1] == (1 << 31) - 1 and got.x[0, 0] == 0
    page, _ = score_page(shape, np.full(16, 2000, np.float16), none, np.ones(16, int), codes)
    assert plane_scores(q, page, 96, shape).over.all()  # a coefficient saturates, so nothing of the page is sure


@pytest.mark.parametrize(("field", "value"), [("head_dim", 24), ("head_dim", 144), ("q_heads", 9), ("page_bytes", 192)])
def test_a_shape_that_cannot_be_is_refused(field, value):
    with pytest.raises(ValueError, match=field):
        PlaneShape(**{"head_dim": 16, field: value})
