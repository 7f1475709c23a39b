"""8-bit values: against torch's E4M3, their range, and pages of them through all operations that move pages.

partner of: ftl/kv/layouts/encoded.py
"""

import numpy as np
import pytest
import torch

from csd_spec import LAYOUTS
from csd_spec.codecs import FP8
from csd_spec.codecs.fp8 import decode, encode
from ftl.kv.layouts.encoded import encode_rows, round_to_codec

FORM = LAYOUTS["fp8"].form(4096, 64, 8192)


def compiled(values):
    return encode_rows(FP8, values)


def decoded(vectors):
    return decode(vectors, vectors.shape[-1] - 1)


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


def test_codes_and_rounding_equal_e4m3():
    bits = drawn(0)
    vectors = compiled(bits)
    scales = 2.0 ** (torch.from_numpy(vectors[:, :1]).double() - 135)
    expected = (floats(bits).double() / scales).float().to(torch.float8_e4m3fn).float()
    codes = torch.from_numpy(vectors[:, 1:].copy()).view(torch.float8_e4m3fn).float()
    assert torch.equal(codes, expected)
    assert (codes.abs().amax(1) >= 128).all() and (codes.abs().amax(1) < 256).all()
    assert torch.equal(floats(decoded(vectors)).double(), codes.double() * scales)


def test_compiled_loop_encodes_as_the_codec_does():
    for bits in (drawn(4), np.arange(0x7F80, dtype=np.uint16).reshape(-1, 96), np.zeros((3, 64), np.uint16)):
        np.testing.assert_array_equal(compiled(bits), encode(bits))
        np.testing.assert_array_equal(compiled(bits | 0x8000), encode(bits | np.uint16(0x8000)))


def test_decoded_rows_encode_to_same_bytes():
    vectors = compiled(drawn(1))
    np.testing.assert_array_equal(compiled(decoded(vectors)), vectors)


def test_extreme_values_encode_without_error():
    most = np.array([[0x7F7F, 0xFF7F, 0x7E80, 0], [0, 0x8000, 1, 0x8001]], np.uint16)
    stored = floats(decoded(compiled(most)))
    assert stored[0].tolist() == [1.75 * 2.0**127, -1.75 * 2.0**127, 2.0**126, 0]
    assert stored[1].abs().max() == 0
    for e in range(-126, 127):
        (value,) = floats(decoded(compiled(brains([2.0**e])))).tolist()
        assert value == (2.0**e if e >= -126 else 0), e


def test_encoded_value_within_half_step():
    bits = drawn(2)
    exact, stored = floats(bits).double(), floats(decoded(compiled(bits))).double()
    least = stored.abs().amax(1, True) * 2.0**-17
    assert ((stored - exact).abs() <= torch.maximum(exact.abs() * 2.0**-4, least)).all()


def test_fp8_page_holds_63_rows():
    """A page of FP16 rows holds 32."""
    assert (FORM.n, FORM.row_bytes, FORM.m, FORM.T, FORM.run_bytes) == (63, 65, 2, 2047, 2048)
    assert LAYOUTS["fp16"].form(4096, 64, 8192).n == 32


@pytest.mark.parametrize("layout", ["fp16", "bf16"])
def test_rows_of_other_layouts_are_not_rounded(layout):
    rows = drawn(3).view(np.float16)
    assert round_to_codec(LAYOUTS[layout].form(4096, 64, 8192), rows) is rows
