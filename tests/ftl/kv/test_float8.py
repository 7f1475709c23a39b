"""8-bit values: against torch's E4M3, their range, and pages of them through everything that moves pages.

partner of: ftl/kv/layouts/float8.py, csd_spec/float8.py
"""

import numpy as np
import pytest
import torch

from csd_spec.float8 import decoded
from csd_spec.model import FP8
from ftl import LAYOUTS
from ftl.kv.layouts.float8 import encoded, kept

FORM = LAYOUTS[FP8].form(4096, 64, 8192)


def brains(values):
    """Bits of BF16."""
    return torch.as_tensor(values, dtype=torch.float32).bfloat16().view(torch.uint16).numpy()


def floats(bits):
    return torch.from_numpy(bits).view(torch.bfloat16).float()


def drawn(seed, shape=(500, 64)):
    """Values of all sizes, in one vector and from vector to vector."""
    generator = np.random.default_rng(seed)
    sizes = generator.uniform(-100, 100, (shape[0], 1)) + generator.uniform(-20, 0, shape)
    return brains(generator.standard_normal(shape) * 2.0**sizes)


def test_codes_and_rounding_are_those_of_e4m3():
    bits = drawn(0)
    vectors = encoded(bits)
    scales = 2.0 ** (torch.from_numpy(vectors[:, :1]).double() - 135)
    expected = (floats(bits).double() / scales).float().to(torch.float8_e4m3fn).float()
    codes = torch.from_numpy(vectors[:, 1:].copy()).view(torch.float8_e4m3fn).float()
    assert torch.equal(codes, expected)
    assert (codes.abs().amax(1) >= 128).all() and (codes.abs().amax(1) < 256).all()
    assert torch.equal(floats(decoded(vectors)).double(), codes.double() * scales)


def test_what_is_stored_is_stored_again_as_it_is():
    vectors = encoded(drawn(1))
    np.testing.assert_array_equal(encoded(decoded(vectors)), vectors)


def test_the_largest_and_the_smallest_are_no_error():
    most = np.array([[0x7F7F, 0xFF7F, 0x7E80, 0], [0, 0x8000, 1, 0x8001]], np.uint16)
    stored = floats(decoded(encoded(most)))
    assert stored[0].tolist() == [1.75 * 2.0**127, -1.75 * 2.0**127, 2.0**126, 0]
    assert stored[1].abs().max() == 0
    for e in range(-126, 127):
        (value,) = floats(decoded(encoded(brains([2.0**e])))).tolist()
        assert value == (2.0**e if e >= -126 else 0), e


def test_a_value_is_within_half_of_its_last_bit_or_of_its_rows_least():
    bits = drawn(2)
    given, stored = floats(bits).double(), floats(decoded(encoded(bits))).double()
    least = stored.abs().amax(1, True) * 2.0**-17
    assert ((stored - given).abs() <= torch.maximum(given.abs() * 2.0**-4, least)).all()


def test_a_page_holds_nearly_twice_as_much():
    assert (FORM.n, FORM.row_bytes, FORM.m, FORM.T, FORM.run_bytes) == (63, 65, 2, 2047, 2048)
    assert LAYOUTS[16].form(4096, 64, 8192).n == 32


@pytest.mark.parametrize("number", [16, 3])
def test_rows_of_other_layouts_are_left_alone(number):
    rows = drawn(3).view(np.float16)
    assert kept(LAYOUTS[number].form(4096, 64, 8192), rows) is rows
