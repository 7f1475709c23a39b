"""Golden models of the units for pages of progressive precision against plain arithmetic.

partner of: attention_engine/rtl/golden_progressive.py
"""

import math

import numpy as np
import pytest
from progressive_pages import WIDTHS, any_score_page, any_value_page, refined_page, score_page

from attention_engine.rtl.golden import LOGIT_FRAC, fp16_units, softmax_online
from attention_engine.rtl.golden_progressive import (
    digit_scores,
    digit_sums,
    fp16_parts,
    hadamard,
    int8_unpack,
    int8_value,
    page_codes,
    page_digits,
    page_gains,
    page_limits,
    round_even,
    share,
    value_sums,
    value_weights,
)
from attention_engine.rtl.params import LOG2_E, ProgressiveShape
from csd_io.rotation import butterflies
from csd_spec.progressive import SIGNS
from ftl.kv.layouts.coarse import begin_scores, decode_scores, decode_values, put_scores, put_values

SHAPES = [ProgressiveShape(head_dim=d, m=m, q_heads=2) for d, m in ((64, 64), (128, 64), (128, 128))]
IDS = ["64", "2 x 64", "128"]


def test_parts_of_a_value_are_the_value():
    for bits in range(1 << 16):
        sig, shift = fp16_parts(bits)
        assert (-1 if bits >> 15 else 1) * (sig << shift) == fp16_units(bits) and sig < 2048


def test_refined_values_are_exact_in_fp16():
    for exponent in range(-24, 10):
        for code in range(-127, 128):
            got = np.uint16(int8_value(code, exponent)).view(np.float16)
            assert float(got) == math.ldexp(code, exponent)
    assert int8_value(-128, 8) == 0xF800 and int8_value(-128, 9) == 0xFC00
    assert int8_value(0, 10) == int8_value(5, -25) == 0x7E00


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_refined_page_is_unpacked(shape):
    numbers = np.random.default_rng(1)
    of_k, of_v = (numbers.integers(-24, 10, size) for size in (shape.head_dim, shape.refined))
    codes = numbers.integers(-127, 128, (2, shape.refined, shape.head_dim))
    got = int8_unpack(refined_page(shape, of_k, of_v, codes), shape)
    exponents = np.stack(np.broadcast_arrays(of_k, of_v[:, None]))
    assert np.array_equal(got.view(np.float16), np.ldexp(codes.astype(float), exponents))


def test_halves_are_rounded_to_even():
    for value in range(200):
        for right in range(5):
            assert round_even(value, right) == np.rint(value / 2**right)


def plain(q, page, shape):
    """acc, e and offset (query, token), as float64 and numpy give them."""
    m, form = shape.m, shape.form
    head = np.frombuffer(page, np.float16, 2 * m).astype(float).reshape(2, m)
    widths = np.frombuffer(page, np.uint8)[4 * m : 5 * m].astype(int)
    channels = np.repeat(np.arange(m), widths)
    levels = np.concatenate([np.arange(width) for width in widths])
    exact = (q.astype(float) * head[0])[:, channels] * 4.0**levels
    e = np.floor(np.log2(np.abs(exact).max(1))).astype(int) - 6
    coefs = np.clip(np.rint(exact * 2.0 ** -e[:, None]), -127, 127).astype(np.int8)
    acc = coefs.astype(np.int32) @ page_digits(page, shape)[:, : len(channels)].T.astype(np.int32)
    assert len(channels) <= form.D
    return acc, e, np.rint(q.astype(float) * head[1] * 2**20).astype(np.int64).sum(1)


@pytest.mark.parametrize("kind", WIDTHS[:4])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_score_sums_equal_exact_arithmetic(shape, kind):
    numbers = np.random.default_rng(2)
    for spread in (0.01, 2, 3000):
        q = numbers.normal(0, spread, (2, shape.m)).astype(np.float16)
        page, _ = any_score_page(kind, numbers, shape)
        got, (acc, e, offset) = digit_sums(q.view(np.uint16), page, shape.form.T, shape), plain(q, page, shape)
        assert np.array_equal(got.acc, acc) and np.array_equal(got.top - 55, e) and np.array_equal(got.offset, offset)
        assert not got.bad


@pytest.mark.parametrize("kind", WIDTHS[:5])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_scores_equal_scaled_sums(shape, kind):
    """x is the sum times log2(e) / sqrt(d), within its own rounding and that of the factor."""
    numbers = np.random.default_rng(3)
    q = numbers.normal(0, 2, (2, shape.head_dim)).astype(np.float16)
    pages = [any_score_page(kind, numbers, shape)[0] for _ in range(shape.parts)]
    got = digit_scores(q.view(np.uint16), pages, shape.form.T, shape)
    logits = sum(p.acc * 2.0 ** (p.top[:, None] - 55) + p.offset[:, None] * 2.0**-20 for p in got.parts)
    want = logits * LOG2_E / math.sqrt(shape.head_dim)
    assert (abs(got.x * 2.0**-LOGIT_FRAC - want) <= 2.0 ** -(LOGIT_FRAC + 1) + abs(want) * 2.0**-23).all()
    assert not got.bad and not got.over.any()


@pytest.mark.parametrize("shape", SHAPES[::2], ids=IDS[::2])
def test_pages_of_the_layout_are_read(shape):
    """Pages written by the layout decode to K; the error of scores is the rounding of coefficients to int8 only."""
    numbers = np.random.default_rng(4)
    rows = (numbers.normal(0, 1, (1, shape.form.T, shape.m)) * numbers.uniform(0.1, 3, shape.m)).astype(np.float16)
    pages = np.zeros((1, shape.page_bytes), np.uint8)
    begin_scores(pages, shape.form, rows)
    put_scores(pages, shape.form, 0, rows)
    q = numbers.normal(0, 1, (2, shape.head_dim)).astype(np.float16)
    got = digit_scores(q.view(np.uint16), [pages.tobytes()], shape.form.T, shape)
    page = pages.tobytes()
    widths = np.frombuffer(page, np.uint8)[4 * shape.m : 5 * shape.m].astype(int)
    factor = LOG2_E / math.sqrt(shape.head_dim)
    want = q.astype(float) @ decode_scores(pages, shape.form)[0].T.astype(float) * factor
    bound = (1.5 * widths.sum() * 2.0 ** (got.parts[0].top - 55) + shape.m * 2.0**-21) * factor + 1e-5
    assert (abs(got.x * 2.0**-LOGIT_FRAC - want).max(1) <= bound).all()


VALUES = [
    ProgressiveShape(head_dim=d, m=m, v_bits=bits)
    for d, m, bits in ((64, 64, 2), (64, 64, 4), (96, 48, 2), (128, 128, 4))
]


@pytest.mark.parametrize("shape", VALUES, ids=["64", "64 in 4 bits", "48", "128 in 4 bits"])
def test_values_of_the_layout_are_summed(shape):
    """Rotated back, sums equal those of the values that the layout decodes; weights are off by half a unit."""
    numbers, form = np.random.default_rng(6), shape.form
    rows = numbers.normal(0, 1, (1, form.value_tokens, shape.m)).astype(np.float16)
    pages = np.zeros((1, shape.page_bytes), np.uint8)
    put_values(pages, form, 0, rows)
    pages[:, form.sizes_bytes : form.value_header] = 0  # rests are not in the RTL
    page, tokens = pages.tobytes(), form.value_tokens - 3
    weights = np.rint(numbers.exponential(0.1, tokens).clip(0, 1) * 2**24).astype(np.int64)
    sizes = np.frombuffer(page, np.uint16)[:tokens]
    W, power, bad = value_weights(weights.tolist(), sizes.tolist())
    unit = 2.0 ** (power + 32 - 7 - 48)
    exact = weights * 2.0**-24 * sizes.view(np.float16).astype(float)
    assert (abs(np.array(W) * unit - exact) <= np.where(np.array(W) < 127, unit / 2, unit)).all()
    assert not bad and 63 <= max(W) <= 127
    sums = value_sums(np.array([W]), page, shape)[0]
    turned = np.array(hadamard([int(value) << power for value in sums], shape.rotation)) * 2.0**-24
    signs = np.array([-1 if int(SIGNS) >> c % 64 & 1 else 1 for c in range(shape.m)])
    got = turned / math.sqrt(shape.rotation) * signs
    want = weights * 2.0**-24 @ decode_values(pages, form)[0, :tokens].astype(float)
    codes = page_codes(page, shape)[:tokens] - ((1 << form.v_bits) - 1) / 2
    assert (abs(got - want) <= abs(codes).sum() / math.sqrt(shape.rotation) * unit / 2 + 1e-3).all()
    assert abs(got - want).max() <= 0.02 * abs(want).max() + tokens**0.5 * unit * 4


def test_rotation_equals_that_of_layout():
    numbers = np.random.default_rng(7)
    for m in (16, 48, 64, 128):
        values = numbers.integers(-1000, 1000, m)
        want = values.astype(np.float32)
        butterflies(want)
        got = np.array(hadamard(values.tolist(), m & -m)) / math.sqrt(m & -m)
        assert abs(got - want).max() < 1e-3
        assert hadamard(hadamard(values.tolist(), m & -m), m & -m) == (values * (m & -m)).tolist()


def test_value_weights_scale_largest_to_7_bits():
    assert value_weights([0, 0], [0x3C00, 0x3C00]) == ([0, 0], 0, False)
    assert value_weights([1 << 24], [0x7BFF]) == ([127], 32, False)  # the largest there is; it would round to 128
    assert value_weights([1 << 24, 1 << 17], [0x3C00, 0x3C00]) == ([64, 1], 17, False)  # half of a unit goes up
    assert value_weights([1 << 24, 1 << 24], [0xBC00, 0x3C00]) == ([0, 64], 17, True)
    assert value_weights([1 << 24, 1 << 24], [0x8000, 0x7C00]) == ([0, 0], 0, True)


def test_chosen_pages_equal_float64():
    """Except for pages whose gain or mass is within the stated error of the fixed-point arithmetic."""
    numbers = np.random.default_rng(9)
    x = numbers.normal(0, 3, (2, 700))
    fixed = np.rint(x * 2**LOGIT_FRAC).astype(np.int64)
    rows = [softmax_online(row.tolist()) for row in fixed]
    shares = np.array([[share(int(v), row.top) for v in line] for line, row in zip(fixed, rows, strict=True)])
    gain_least, mass_least = 5e-4, 0.3
    thresholds = round(gain_least * 2**32), round(mass_least * 2**32)
    chosen, read = page_gains(shares, [page_limits(row.total, thresholds) for row in rows], 31, 224)
    w = np.exp2(x - [[row.top] for row in rows])
    l = w.sum(1)[:, None]  # noqa: E741
    pages, n = -(-700 // 31), 31
    gains = np.add.reduceat(w**2, np.arange(0, 700, n), axis=1)
    sums = np.add.reduceat(w, np.arange(0, 700, n), axis=1)
    off = 2.0**-17 * sums + n * 2.0**-36 + gain_least * (l * 2.0**-16 + l**2 * 2.0**-20) + gains * 2.0**-20
    want, sure = (gains > gain_least * l**2).any(0), (abs(gains - gain_least * l**2) > off).all(0)
    assert np.array_equal(chosen[sure], want[sure]) and 0 < want.sum() < pages and sure.sum() > pages - 4
    masses = np.add.reduceat(w, np.arange(0, 700, 224), axis=1)
    assert np.array_equal(read, (masses > mass_least * l).any(0)) and not read.all()


def test_value_page_codes_round_trip():
    numbers, shape = np.random.default_rng(8), VALUES[1]
    page = any_value_page(numbers, shape)
    assert np.array_equal(page_codes(page, shape).max(0), np.full(64, 15))
    assert np.array_equal(value_sums(np.eye(3, dtype=np.int64), page, shape), 2 * page_codes(page, shape)[:3] - 15)


def test_out_of_range_input_sets_flag():
    shape, numbers = ProgressiveShape(head_dim=16, m=16, page_bytes=512, k_bits=3), np.random.default_rng(5)
    q = np.full((1, 16), 0x3C00, np.uint16)
    for kind in WIDTHS:
        page, _ = any_score_page(kind, numbers, shape)
        assert digit_scores(q, [page], 5, shape).bad == kind.startswith("too")
    widths, codes = np.array([2] * 8 + [0] * 8), numbers.integers(0, 16, (shape.form.T, 16))
    scale, least = np.full(16, 0.5, np.float16), np.full(16, -1, np.float16)
    right = digit_scores(q, [score_page(shape, scale, least, widths, codes)[0]], 9, shape)
    for channel, told in ((3, True), (12, False)):  # the scale of a channel without digits is not looked at
        broken, zeros = scale.copy(), scale.copy()
        broken[channel], zeros[channel] = np.nan, 0
        got = digit_scores(q, [score_page(shape, broken, least, widths, codes)[0]], 9, shape)
        want = digit_scores(q, [score_page(shape, zeros, least, widths, codes)[0]], 9, shape)
        assert got.bad == told and np.array_equal(got.x, want.x) and np.array_equal(got.x, right.x) != told
    q[0, 15] = 0xFC00
    assert digit_scores(q, [score_page(shape, scale, least, widths, codes)[0]], 9, shape).bad


@pytest.mark.parametrize(("field", "value"), [("head_dim", 24), ("m", 8), ("q_heads", 9), ("page_bytes", 100)])
def test_invalid_progressive_shape_is_refused(field, value):
    with pytest.raises(ValueError, match=field):
        ProgressiveShape(**{"head_dim": 16, "m": 16, field: value})
