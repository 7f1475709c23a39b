"""FP16 and BF16 values in and out: sums in token order, and NaN and infinity are detected."""

import numpy as np
import pytest

from attention_engine import add_rows, all_finite, to_half, widen_inputs
from attention_engine.values import widen

KINDS = pytest.mark.parametrize("bf16", [False, True])


def some(generator, *shape, bf16=False):
    """FP16, or the upper halves of FP32."""
    values = generator.standard_normal(shape).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.float16) if bf16 else values.astype(np.float16)


def wide_of(values, bf16):
    return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32) if bf16 else values.astype(np.float32)


@KINDS
@pytest.mark.parametrize("B", [1, 3])
def test_inputs_are_widened_summed_and_averaged(B, bf16):
    """q widened, a token added to the sums, and means, as numpy has them."""
    generator, H, G, d = np.random.default_rng(B), 2, 3, 8
    q, v = some(generator, B, H, G, d, bf16=bf16), some(generator, B, H, d, bf16=bf16)
    before = generator.standard_normal((B * H, d)).astype(np.float32)
    seq_lens, sums = np.arange(1, B * H + 1), before.copy()
    wide, means = widen_inputs(q, v, seq_lens, sums, bf16)
    assert wide.dtype == np.float32 and (wide == wide_of(q, bf16).reshape(B * H, G, d)).all()
    assert (sums == before + wide_of(v, bf16).reshape(B * H, d)).all()
    assert (means == np.divide(sums, seq_lens[:, None], dtype=np.float32)).all()


@KINDS
def test_a_token_is_added_as_rows_are(bf16):
    generator = np.random.default_rng(0)
    q, v = some(generator, 1, 2, 1, 8, bf16=bf16), some(generator, 1, 2, 8, bf16=bf16)
    one, other = (generator.standard_normal((2, 8)).astype(np.float32) for _ in "ab")
    other[:] = one
    widen_inputs(q, v, np.array([5, 5]), one, bf16)
    add_rows(other, v.view(np.uint16), bf16)
    assert one.tobytes() == other.tobytes()


@KINDS
def test_every_value_round_trips_through_float32(bf16):
    bits = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    numbers = bits[np.isfinite(wide_of(bits, bf16))]
    assert widen(numbers, bf16).tobytes() == wide_of(numbers, bf16).tobytes()
    assert to_half(widen(numbers, bf16), bf16).tobytes() == numbers.tobytes()


def test_bf16_rounding_is_nearest_even():
    """Every position between two neighbours, of all exponents: against float64."""
    below = np.arange(0, 0x7F00, 61, dtype=np.uint32) << 16
    for part in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = (below | np.uint32(part)).view(np.float32)
        got = widen(to_half(values, True), True).astype(np.float64)
        low, high = (bits.view(np.float32).astype(np.float64) for bits in (below, below + 0x10000))
        wide = values.astype(np.float64)
        even = np.where(below >> 16 & 1, high, low)
        nearest = np.where(wide - low < high - wide, low, high)
        assert (got == np.where(wide - low == high - wide, even, nearest)).all()


@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan])
def test_all_finite_detects_nan_and_infinity(wrong):
    for shape in ((7,), (2, 3), (2, 3, 4, 5)):
        values = np.full(shape, 65504, np.float16)
        assert all_finite(values) and all_finite(values.astype(np.float32))
        values[(-1,) * len(shape)] = wrong
        assert not all_finite(values) and not all_finite(values.astype(np.float32))
        with pytest.raises(FloatingPointError):
            to_half(values.astype(np.float32))


def test_fp16_rounding_is_nearest():
    values = np.array([1 + 2**-11, 1 + 3 * 2**-11, 65519, 2**-25, -0.0], np.float32)
    assert to_half(values).tobytes() == values.astype(np.float16).tobytes()
