"""Codes of 8 bits, and those of low-bit copies: their error on keys and values of any kind.

partner of: ftl/kv/layouts/codes.py, ftl/kv/layouts/coded.py
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csd_spec.progressive import Progressive
from ftl.kv.layouts.coded import coded as copied
from ftl.kv.layouts.codes import refine, refined, to_fp32
from tests.ftl.kv.low_bit_pages import any_values, values_of
from tests.properties import examples

FORM = Progressive.for_context(512, 16, (2.5, 2), 128)
SEEDS = st.integers(0, 1 << 32)
KINDS = pytest.mark.parametrize("bf16", [False, True])


@KINDS
@pytest.mark.parametrize("latent", [False, True])
@settings(max_examples=examples(60))
@given(seed=SEEDS)
def test_8_bit_codes_are_within_half_step_and_idempotent(bf16, latent, seed):
    """A step is a power of two, at most 1/63.5 of the largest value of K's channel or V's token; the largest FP16 loses
    480."""
    form = replace(FORM, bf16=bf16, latent=latent)
    assert form.n == (31 if latent else 15), "K alone has twice as many tokens to a page"
    rows = any_values(seed, 3, form.n, form.parts * 16, bf16=bf16)
    pages = np.zeros((3, 512), np.uint8)
    refine(pages, form, rows)
    back = refined(pages, form)
    values, got = values_of(rows, bf16), to_fp32(back, bf16).astype(np.float64)
    for part, axis in ((slice(0, 16), 1), (slice(16, 32), 2)):
        most = np.abs(values[..., part]).max(axis, keepdims=True, initial=0)
        error = np.abs(got - values)[..., part]
        assert (error <= np.maximum(most / 127, 2.0 ** (-127 if bf16 else -25))).all()
    again = np.zeros((3, 512), np.uint8)
    refine(again, form, back)
    np.testing.assert_array_equal(refined(again, form), back)


@KINDS
@pytest.mark.parametrize("bits", [8, 4])
@settings(max_examples=examples(60))
@given(seed=SEEDS)
def test_copy_in_few_bits_is_within_half_a_step(bf16, bits, seed):
    runs, levels = any_values(seed, 5, 60, bf16=bf16), (1 << bits) - 1
    scale, least, codes = copied(runs, levels, bf16)
    values, (scales, lows) = values_of(runs, bf16), (to_fp32(part, bf16)[:, None] for part in (scale, least))
    span = np.ptp(values, axis=1, keepdims=True)
    slack = span / levels * 2.0**-8 + levels * 2.0**-133 if bf16 else span * 2.0**-11 + levels * 2.0**-25
    error = np.abs(lows + scales.astype(np.float64) * codes - values)
    assert (error <= span / levels / 2 + slack).all()
